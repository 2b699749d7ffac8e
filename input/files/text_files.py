"""Reads text files piece by piece, plain or gzip. Host code."""

import gzip
import zlib
from collections.abc import Iterator

from ..data import InputError
from .storage import Files

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 17  # its lines' fields fit into the cache: at 1 << 22, parsing them takes twice as long
_LINE_BYTES = 1 << 20


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
        with Files([path]).stream(0) as raw:
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
