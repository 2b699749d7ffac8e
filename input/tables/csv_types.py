"""What the fields of a CSV column are: integers, numbers, dates, times or text; and how they become `pyarrow`'s values.

Host code. `pyarrow` decides whole columns at once; where it can't (a blank before a number, a plus), Python does, field
by field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FIRST = 64  # values that are tried before all of a block
_BEYOND = "beyond"  # integers of which some are not int64
_LEADING_ZERO = r"^\s*[+-]?0([0-9]+|[xX].*)\s*$"  # or hexadecimal, which `pyarrow` would read
_INTEGER = r"^\s*[+-]?[0-9]+\s*$"
# What a column may turn out to be, after values of a kind.
_NEXT = {
    None: ("int", _BEYOND, "float", "date", "time", "zoned"),
    "int": ("int", _BEYOND, "float"),
    _BEYOND: (_BEYOND, "float"),
    "float": ("float",),
    "date": ("date", "time"),
    "time": ("time",),
    "zoned": ("zoned",),
}
_WORDS = {"int": "an integer", "float": "a number", "date": "a date (2024-02-29)"}
_WORDS |= {"time": "a date and time (2024-02-29 12:30:00)", "zoned": "a time with its zone (2024-02-29T12:30:00Z)"}


class Unfit(ValueError):
    """A field is not of its column's kind.

    Args:
      row: its place among those converted.
      field: its text.
    """

    def __init__(self, row: int, field: str):
        super().__init__(field)
        self.row, self.field = row, field


class Converter:
    """Converts a column's fields to values of a kind: "int", "float", "date", "time", "zoned" or "text".

    Attributes:
      type: of `pyarrow`, what it makes.
      expects: what a field has to be, for people.
    """

    def __init__(self, kind: str):
        import pyarrow as pa

        self._kind, self._pa = kind, pa
        self.expects = _WORDS.get(kind, "text")
        self.type = {
            "int": pa.int64(),
            "float": pa.float64(),
            "date": pa.date32(),
            "time": pa.timestamp("us"),
            "zoned": pa.timestamp("us", "UTC"),
        }.get(kind, pa.string())

    def convert(self, fields) -> Any:
        """Converts an array of text; an empty field has no value, but as text. Raises `Unfit`."""
        import pyarrow.compute as pc

        if self._kind == "text":
            return fields
        is_empty = pc.equal(fields, "")
        if pc.any(is_empty).as_py():
            fields = pc.if_else(is_empty, None, fields)
        try:
            if self._kind == "int" and pc.any(pc.match_substring(fields, "x", ignore_case=True)).as_py():
                raise self._pa.ArrowInvalid("hexadecimal")
            return fields.cast(self.type)
        except self._pa.ArrowInvalid:
            parsed = [
                None if field is None else self._parsed(row, field) for row, field in enumerate(fields.to_pylist())
            ]
            return self._pa.array(parsed, self.type)

    def _parsed(self, row: int, field: str) -> Any:
        try:
            if self._kind in ("int", "float"):
                return number(field) if self._kind == "float" else integer(field)
            return self._pa.array([field]).cast(self.type)[0].as_py()
        except (ValueError, self._pa.ArrowInvalid):
            raise Unfit(row, field) from None


class Finder:
    """Finds the kind of a column, from all of its fields.

    Args:
      kind: "text", where it is decided; None where it is to be found.
    """

    def __init__(self, kind: str | None):
        import pyarrow as pa

        self._pa = pa
        self._kind = kind
        self._why = "as texts= says" if kind else ""

    def add(self, fields) -> None:
        """Takes some fields, as an array of text."""
        import pyarrow.compute as pc

        if self._kind == "text":
            return
        is_empty = pc.equal(fields, "")
        if pc.any(is_empty).as_py():
            fields = fields.filter(pc.invert(is_empty))
        if not len(fields):
            return
        for kind in _NEXT[self._kind]:
            if self._are(kind, fields[:_FIRST]) and (len(fields) <= _FIRST or self._are(kind, fields)):
                break
        else:
            kind = "text"
        is_number = kind in ("int", _BEYOND, "float")
        if is_number and pc.any(pc.match_substring_regex(fields, _LEADING_ZERO)).as_py():
            kind, self._why = "text", "leading zeros"
        self._kind = kind

    def end(self) -> tuple[str, str]:
        """Returns the kind, and why it is text where its fields look like numbers."""
        if self._kind == _BEYOND:
            return "text", "integers beyond int64"
        return self._kind or "text", self._why

    def _are(self, kind: str, fields) -> bool:
        import pyarrow.compute as pc

        if kind == _BEYOND:
            return pc.all(pc.match_substring_regex(fields, _INTEGER)).as_py()
        try:
            fields.cast(Converter(kind).type)
            return True
        except self._pa.ArrowInvalid:
            parse: dict[str, Callable[[str], Any]] = {"int": integer, "float": number}
            if kind not in parse:
                return False
        try:
            for field in fields.unique().to_pylist():
                parse[kind](field)
        except ValueError:
            return False
        return True


def integer(field: str) -> int:
    """Returns an integer as Python reads it; raises ValueError if it is not one, or beyond int64."""
    value = int(field)
    if "_" in field or not -(2**63) <= value < 2**63:
        raise ValueError(field)
    return value


def number(field: str) -> float:
    """Returns a number as Python reads it; raises ValueError if it is not one."""
    if "_" in field:
        raise ValueError(field)
    return float(field)
