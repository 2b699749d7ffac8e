"""Reads the headers of image files: their format, size in pixels and EXIF orientation.

Formats: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, https://www.w3.org/TR/png-3,
https://www.w3.org/Graphics/GIF/spec-gif89a.txt.
EXIF: CIPA DC-008, tag 0x0112 of the first directory of a TIFF structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

JPEG, PNG, GIF, BMP = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM"
# Where libjpeg finds the next marker, markers with an image's size after them, and markers that stand alone.
_MARKER = re.compile(rb"\xff+([^\0\xff])")
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ALONE = {0x01, *range(0xD0, 0xDA)}
_APP1, _EXIF = 0xE1, b"Exif\0\0"
_ORIENTATION = 0x0112
_GIF_FRAME, _GIF_EXTENSION = b",", b"!"
_SHORT = 3  # a TIFF type: two bytes


class Header(NamedTuple):
    """The size and orientation in an image file's header.

    Attributes:
      pixels: number of pixels, of a GIF those of its largest frame; 0 if unknown.
      orientation: 1 to 8, as in EXIF; 1 is upright, also for a missing or wrong value.
    """

    pixels: int
    orientation: int = 1


def is_image(head: bytes) -> bool:
    """Returns whether a file's first bytes are those of a supported image format."""
    return head.startswith((JPEG, PNG, GIF, BMP))


def read(content: bytes) -> Header:
    """Reads the header of a JPEG, PNG, GIF or BMP file."""
    if content.startswith(PNG):
        pixels = int.from_bytes(content[16:20], "big") * int.from_bytes(content[20:24], "big")
        return Header(pixels, _orientation(_png_exif(content)))
    if content.startswith(GIF):
        return Header(max(_gif_pixels(content)))
    if content.startswith(BMP):
        width, height = (int.from_bytes(content[at : at + 4], "little", signed=True) for at in (18, 22))
        return Header(abs(width * height))
    return _jpeg(content)


def _gif_pixels(content: bytes) -> Iterator[int]:
    """Yields the pixels of a GIF's canvas and of each frame, which may be larger."""

    def area(at: int) -> int:
        return int.from_bytes(content[at : at + 2], "little") * int.from_bytes(content[at + 2 : at + 4], "little")

    def colours(at: int) -> int:
        flags = content[at] if at < len(content) else 0
        return 3 << (flags % 8 + 1) if flags & 0x80 else 0

    yield area(6)
    at = 13 + colours(10)
    while (kind := content[at : at + 1]) in (_GIF_FRAME, _GIF_EXTENSION):
        if kind == _GIF_FRAME:
            yield area(at + 5)
            at += 11 + colours(at + 9)
        else:
            at += 2
        while at < len(content) and content[at]:  # blocks, each after its size
            at += 1 + content[at]
        at += 1


def _jpeg(content: bytes) -> Header:
    at, exif = 2, b""
    while marker := _MARKER.search(content, at):
        at, code = marker.end(), marker[1][0]
        if code in _FRAMES:
            pixels = int.from_bytes(content[at + 3 : at + 5], "big") * int.from_bytes(content[at + 5 : at + 7], "big")
            return Header(pixels, _orientation(exif))
        if code not in _ALONE:
            size = int.from_bytes(content[at : at + 2], "big")
            if code == _APP1 and not exif and content.startswith(_EXIF, at + 2):
                exif = content[at + 2 + len(_EXIF) : at + size]
            at += size
    return Header(0, _orientation(exif))


def _png_exif(content: bytes) -> bytes:
    at = len(PNG)
    while at + 8 <= len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        if content.startswith(b"eXIf", at + 4):
            return content[at + 8 : at + 8 + size]
        at += 12 + size
    return b""


def _orientation(tiff: bytes) -> int:
    if tiff[:2] not in (b"II", b"MM"):
        return 1

    def number(at: int, nbytes: int) -> int:
        return int.from_bytes(tiff[at : at + nbytes], "little" if tiff[:2] == b"II" else "big")

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * number(directory, 2), 12):
        if number(entry, 2) == _ORIENTATION and number(entry + 2, 2) == _SHORT:
            return orientation if 1 <= (orientation := number(entry + 8, 2)) <= 8 else 1
    return 1


def unreadable_reason(content: bytes) -> str | None:
    """Returns why no decoder reads a file; None if one does."""
    if not is_image(content[:16]):
        return "does not begin as a JPEG, PNG, GIF or BMP" if content else "is empty"
    if content.startswith(BMP):
        bits, packing = int.from_bytes(content[28:30], "little"), int.from_bytes(content[30:34], "little")
        if bits not in (24, 32) or packing not in (0, 3):
            return f"is a BMP of {bits} bits a pixel{', compressed' * (packing not in (0, 3))}; 24 and 32 are read"
    return None
