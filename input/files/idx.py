"""Reads IDX files, plain or gzip, and refuses those that are not whole. NumPy only.

The format is described at the end of http://yann.lecun.com/exdb/mnist/: two zero bytes, a type
code, the number of axes, each axis's length as a big-endian uint32, then the values in C order.
"""

import math
import os
import struct

import numpy as np

from ..checks import InputError
from . import listing
from .storage import Files, unpacked

_UINT8 = 0x0800  # type code, to which the number of axes is added
_PIECE_BYTES = 1 << 24


def find_idx(data_dir: str, names: tuple[str, ...]) -> list[str]:
    """Returns the path of each name, or of `name.gz` if the folder has that instead.

    Raises:
      InputError: the folder or a file is missing; the message lists the folder's contents.
    """
    if not os.path.isdir(data_dir):
        actual = "a file" if os.path.exists(data_dir) else "nothing"
        raise InputError(f"data_dir={data_dir}: expected a folder with {names[0]}[.gz], found {actual}")
    paths = [os.path.join(data_dir, name) for name in names]
    paths = [path if os.path.exists(path) else f"{path}.gz" for path in paths]
    if missing := next((path for path in paths if not os.path.exists(path)), None):
        raise InputError(f"{missing[:-3]}[.gz] is missing: found {listing.describe_path(data_dir)}")
    return paths


def read_idx(path: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """Reads a whole IDX file of unsigned bytes, plain or gzip. Raises `InputError` for any other.

    Args:
      path: the file.
      shape: the lengths that the axes must have; None stands for any length but zero.

    Returns:
      A read-only uint8 array.
    """
    expected = (_UINT8 + len(shape), *shape)
    with Files([path]).stream(0) as stream, unpacked(stream, path) as file:
        header = file.read(4 * len(expected))
        found = struct.unpack(f">{len(header) // 4}I", header[: len(header) // 4 * 4])
        if len(found) < len(expected) or not all(n and m in (None, n) for n, m in zip(found, expected, strict=True)):
            numbers = str([*expected]).replace("None", "N")
            raise InputError(
                f"{path} is not an IDX file of this shape: expected a header of {numbers} with N above 0, found "
                f"{[*found]} in {len(header)} bytes"
            )
        count, values = math.prod(found[1:]), bytearray()
        # In pieces, since the header may mean more than memory holds, and to the end, where gzip's checksum is.
        while piece := file.read(min(_PIECE_BYTES, count + 1 - len(values))):
            values += piece
    if len(values) != count:
        actual = f"{len(values):,} bytes" if len(values) < count else "more"
        raise InputError(f"{path} has another length than its header means: expected {count:,} bytes, found {actual}")
    array = np.frombuffer(values, np.uint8).reshape(found[1:])
    array.flags.writeable = False
    return array
