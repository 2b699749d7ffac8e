"""Reads IDX files, plain or gzip, and refuses those that are not whole. Host code, NumPy only.

The format is described at the end of http://yann.lecun.com/exdb/mnist/: two zero bytes, a type
code, the number of axes, each axis's length as a big-endian uint32, then the values in C order.
"""

import collections
import gzip
import math
import os
import re
import zlib
from io import BufferedReader

import numpy as np

from ..checks import InputError
from . import listing
from .storage import retried

_TYPE_NAMES = {
    0x08: "uint8",
    0x09: "int8",
    0x0B: "int16",
    0x0C: "int32",
    0x0D: "float32",
    0x0E: "float64",
}
_UINT8 = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 1 << 24


def find_idx(data_dir: str, names: tuple[str, ...]) -> list[str]:
    """Returns the path of each name, or of `name.gz` if the folder has that instead.

    Raises:
      InputError: the folder or a file is missing; the message lists the folder's contents.
    """
    if not listing.is_folder(data_dir):
        actual = "a file" if listing.exists(data_dir) else "nothing"
        raise InputError(f"data_dir={data_dir}: expected a folder with {names[0]}[.gz], found {actual}")
    kind = listing.FileKind(f"{names[0]}[.gz]", ("|".join(map(re.escape, names)),))
    left_out: dict[str, list[str]] = collections.defaultdict(list)
    entries = listing.in_folder(data_dir, kind, "data_dir", left_out)
    listing.log_left_out(f"--data_dir={data_dir}", left_out)
    paths = {entry.name.lower().removesuffix(".gz"): entry.path for entry in entries}
    for name in names:
        path = os.path.join(data_dir, name)
        if name not in paths and not os.path.exists(path):
            raise InputError(f"{path}[.gz] is missing: found {listing.describe_path(data_dir)}")
        paths.setdefault(name, path)  # a folder, which can't be read as a file
    return [paths[name] for name in names]


def read_idx(path: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """Reads a whole IDX file of unsigned bytes.

    Args:
      path: the file. Its first bytes, not its name, say whether it is gzip: browsers and copying tools unpack
        `.gz` files without renaming them.
      shape: the lengths that the axes must have; None stands for any length but zero.

    Returns:
      A read-only uint8 array.

    Raises:
      InputError: one line with the path, what was expected and what was found.
    """
    try:
        return retried(path, lambda: _read(path, shape))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: expected an IDX file, found none") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file: expected one that unpacks, found: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: str, shape: tuple[int | None, ...]) -> np.ndarray:
    with open(path, "rb") as file:
        is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        return _read_checked(path, gzip.open(file) if is_gzip else file, shape)


def _read_checked(path: str, file: gzip.GzipFile | BufferedReader, shape: tuple[int | None, ...]) -> np.ndarray:
    """Reads and checks the header, then no more than the values it announces, and one byte."""
    rank = len(shape)
    header_bytes = 4 + 4 * rank
    header = file.read(header_bytes)
    if not header:
        raise InputError(f"{path} is empty: expected an IDX file, found 0 bytes")
    _check_type(path, header, rank)
    if len(header) < header_bytes:
        raise InputError(f"{path} is truncated: expected a header of {header_bytes} bytes, found {len(header)} bytes")
    shape_in_file = tuple(int(n) for n in np.frombuffer(header, ">u4", count=rank, offset=4))
    _check_shape(path, shape_in_file, shape)
    expected_bytes = math.prod(shape_in_file)
    values = bytearray()
    # Read in pieces to the end, whatever the header says: gzip's checksum is there.
    while piece := file.read(min(_PIECE_BYTES, expected_bytes + 1 - len(values))):
        values += piece
    if len(values) != expected_bytes:
        too_few = len(values) < expected_bytes
        raise InputError(
            f"{path} {'is truncated' if too_few else 'has trailing bytes'}: its header ({_times(shape_in_file)}) means "
            f"{header_bytes + expected_bytes} bytes, found {header_bytes + len(values) if too_few else 'more'} bytes"
        )
    array = np.frombuffer(values, np.uint8).reshape(shape_in_file)
    array.flags.writeable = False
    return array


def _check_type(path: str, header: bytes, rank: int) -> None:
    """Checks the magic number in three parts, so that the message names the wrong one."""
    expected = bytes([0, 0, _UINT8, rank])
    if header[:4] == expected:
        return
    magic = f"expected magic number 0x{expected.hex()}, found 0x{header[:4].hex()}"
    if len(header) < 4:
        raise InputError(f"{path} is truncated: {magic}")
    if header[:2] != b"\0\0" or header[2] not in _TYPE_NAMES:
        raise InputError(f"{path} is not an IDX file: {magic}")
    if header[2] != _UINT8:
        raise InputError(f"{path} holds {_TYPE_NAMES[header[2]]}, not uint8: {magic}")
    raise InputError(f"{path} holds arrays of {header[3]} axes, not {rank}: {magic}")


def _check_shape(path: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    if shape[0] == 0:
        raise InputError(f"{path} holds no examples: expected at least 1, found 0")
    if any(e is not None and e != f for e, f in zip(expected, shape, strict=True)):
        raise InputError(
            f"{path} holds examples of another size: expected {_times(expected[1:])}, found {_times(shape[1:])}"
        )


def _times(shape: tuple[int | None, ...]) -> str:
    return "x".join("N" if n is None else str(n) for n in shape)
