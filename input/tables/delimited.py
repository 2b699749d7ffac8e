"""Reads text files of one record a line; counts the malformed ones, and refuses too many. Host code.

A record is a line: a quoted line break inside a field is malformed, so an unclosed quote costs one record and not the
rest of the file.
"""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..data import InputError
from ..files.text_files import read_lines

_SHOWN = 60  # characters of a malformed record or field in a message

Parsed = TypeVar("Parsed")


class BadRecords:
    """The malformed records of all files of an input: counts them, keeps the first, refuses too many."""

    def __init__(self, allowed: int):
        self.allowed = allowed
        self.count = 0
        self.first = ""

    def add(self, path: str, line: int, problem: str) -> None:
        """Counts a malformed record; `problem` is of the form "expected ..., found ...".

        Raises:
          InputError: there are now more than allowed.
        """
        self.count += 1
        self.first = self.first or f"{path}:{line}: {problem}"
        if self.count > self.allowed:
            cure = f"mend the line, or skip such lines by --input_arg max_bad_records={max(10, 2 * self.count)}"
            if self.allowed:
                raise InputError(
                    f"{self.first} (the first of more than max_bad_records={self.allowed} malformed records); {cure}"
                )
            raise InputError(f"{self.first}; {cure}")

    def warn(self) -> None:
        """Logs one line about the skipped records, if there are any."""
        if self.count:
            records = "1 malformed record was" if self.count == 1 else f"{self.count} malformed records were"
            logging.warning("%s skipped; the first: %s", records, self.first)


def read_records(
    path: str,
    parse: Callable[[list[bytes]], Parsed],
    why_bad: Callable[[bytes], str | None],
    bad_records: BadRecords,
    skip_lines: int = 0,
) -> Iterator[Parsed]:
    """Yields what `parse` makes of a file's lines, some thousands at a time; blank lines are left out.

    Lines are checked one by one only where `parse` fails, so that well-formed files stay fast.

    Args:
      path: the file, plain or gzip.
      parse: parses one or more lines; raises ValueError or OverflowError if and only if one is malformed.
      why_bad: returns what is wrong with a line, as "expected ..., found ..."; None if nothing is.
      bad_records: counts the records that are left out.
      skip_lines: how many lines at the file's start are not records.

    Raises:
      InputError: the file cannot be read, is empty, or has too many malformed records.
    """
    number = 1
    for lines in read_lines(path):
        begin = number
        number += len(lines)
        if begin <= skip_lines:  # they lie within the first piece
            lines, begin = lines[skip_lines:], begin + skip_lines
        records = [line for line in lines if line]
        try:
            parsed = [parse(records)] if records else []
        except (ValueError, OverflowError):
            records = _without_bad(path, begin, lines, why_bad, bad_records)
            parsed = [parse(records)] if records else []
        yield from parsed


def _without_bad(path: str, begin: int, lines: list[bytes], why_bad, bad_records: BadRecords) -> list[bytes]:
    good = []
    for number, line in enumerate(lines, begin):
        if line and (problem := why_bad(line)):
            bad_records.add(path, number, problem)
        elif line:
            good.append(line)
    return good


def decode(lines: list[bytes]) -> list[str]:
    """Decodes lines of UTF-8; raises UnicodeDecodeError, which is a ValueError, if one is not UTF-8."""
    return b"\n".join(lines).decode().split("\n")


def shown(text: bytes | str) -> str:
    """Quotes and shortens a line or field for a message, with unprintable characters escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * _SHOWN].decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
