"""Finds the data files that --data_dir names and reads them piece by piece, plain or gzip. Host code."""

import gzip
import os
import re
import zlib
from collections.abc import Iterator

from ..data import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 17  # its lines' fields fit into the cache: at 1 << 22, parsing them takes twice as long
_LINE_BYTES = 1 << 20


def find_files(data_dir: str, patterns: tuple[str, ...], expected: str) -> list[str]:
    """Returns the path itself where it is a file; else the matching files of the folder, not of its subfolders, sorted.

    Args:
      data_dir: a file or a folder.
      patterns: regular expressions for whole names, without the `.gz` that any may have; the first
        that any file matches is used.
      expected: what the patterns mean, for messages.

    Returns:
      At least one path; numbers in names count as numbers (day_2 before day_10). Where a file exists both plain and as
      `.gz`, the plain one.

    Raises:
      InputError: nothing exists at data_dir, or nothing that matches; the message lists what the folder holds.
    """
    if not os.path.isdir(data_dir):
        if not os.path.exists(data_dir):
            raise InputError(f"data_dir={data_dir} is missing: expected a file, or a folder with {expected}")
        return [data_dir]
    names = set(_names(data_dir))
    plain = {
        name: name.removesuffix(".gz")
        for name in names
        if os.path.isfile(os.path.join(data_dir, name))
        and not name.startswith(".")
        and not (name.endswith(".gz") and name.removesuffix(".gz") in names)
    }
    for pattern in patterns:
        if matching := [name for name in plain if re.fullmatch(pattern, plain[name])]:
            return [os.path.join(data_dir, name) for name in sorted(matching, key=_natural)]
    raise InputError(f"data_dir={data_dir}: expected {expected}, found {listing(data_dir)}")


def listing(folder: str) -> str:
    """Lists what a folder holds, shortened, for messages.

    Raises:
      InputError: the folder cannot be read.
    """
    held = sorted(_names(folder))
    return ", ".join(held[:6]) + (f" and {len(held) - 6} more" if len(held) > 6 else "") or "an empty folder"


def read_lines(path: str) -> Iterator[list[bytes]]:
    r"""Yields a file's lines in order, some thousands at a time, without their ends (\n or \r\n).

    Its first bytes, not its name, say whether it is gzip. A byte order mark is left out; an end of line before the end
    of the file makes no further line.

    Raises:
      InputError: the file cannot be read, is empty, is not a whole gzip file, or is not made of lines.
    """
    rest = b""
    for number, chunk in enumerate(_chunks(path)):
        chunk = chunk.removeprefix(_BYTE_ORDER_MARK) if number == 0 else chunk
        whole, newline, after = chunk.rpartition(b"\n")
        if newline:
            yield _split(rest + whole)
            rest = after
        else:
            rest += chunk
            if len(rest) > _LINE_BYTES:
                raise InputError(f"{path}: expected a record a line, found a line longer than {_LINE_BYTES} bytes")
    if rest:
        yield _split(rest)


def _split(text: bytes) -> list[bytes]:
    return text.replace(b"\r\n", b"\n").removesuffix(b"\r").split(b"\n")


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if zipped else raw as file:
                chunk = file.read(_CHUNK_BYTES)
                if not chunk:
                    raise InputError(f"{path} is empty: expected lines of data, found 0 bytes")
                while chunk:
                    yield chunk
                    chunk = file.read(_CHUNK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file: expected one that unpacks, found: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise InputError(f"data_dir={folder} cannot be read: {error.strerror}") from error


def _natural(name: str) -> list:
    """Returns a sort key by which numbers in names count as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"([0-9]+)", name)]
