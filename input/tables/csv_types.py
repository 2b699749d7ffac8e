"""Infers the types of CSV columns (integers, numbers, dates, times, text), and converts them by `pyarrow`.

Types are not left to `pyarrow`'s inference: it reads codes such as 00, 01 as integers. It converts whole columns at
once; where it can't (a blank before a number, a plus), Python does, field by field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...engine.data.preprocessing import MISSING_WORDS

AS_TEXT = "as set by texts=, or by the run"
_FIRST = 64  # values to try before a whole block
_BEYOND = "beyond"  # integers, some beyond int64
_LEADING_ZERO = r"^\s*[+-]?0([0-9]+|[xX].*)\s*$"  # or hexadecimal, which `pyarrow` reads
_INTEGER = r"^\s*[+-]?[0-9]+\s*$"
NUMBER = r"(?i)^\s*[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|inf|infinity)\s*$"
_COMMA = r"[0-9]+,[0-9]+|[0-9]{1,3}(\.[0-9]{3})+,[0-9]+"
_THOUSANDS = r"[0-9]{1,3}([,'\x{2019} \x{a0}\x{202f}][0-9]{3})+([.,][0-9]+)?|[0-9]{1,3}(\.[0-9]{3}){2,}"
_CURRENCY = r"[$\x{20ac}\x{a3}\x{a5}]"
# A number as people write it: with a decimal comma, thousands separators, a percent sign or a currency.
_FORMATTED = rf"^\s*{_CURRENCY}?\s*[+-]?{_CURRENCY}?\s*({_COMMA}|{_THOUSANDS}|[0-9]*\.?[0-9]+)\s*(%|{_CURRENCY})?\s*$"
_DATE = r"^\s*[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+(Z|[+-][0-9:]+)?)?\s*$"
_PER_OTHER = 9  # values of a format, per other value, that make a column of that format
_SETTLED = 10_000  # values after which a column without a format is text
# The kinds that a column may have, after values of a kind.
_NEXT = {
    None: ("int", _BEYOND, "float", "date", "time", "zoned"),
    "int": ("int", _BEYOND, "float"),
    _BEYOND: (_BEYOND, "float"),
    "float": ("float",),
    "date": ("date", "time"),
    "time": ("time",),
    "zoned": ("zoned",),
}
_WORDS = {"int": "an integer", "float": "a number", "float32": "a number", "date": "a date (2024-02-29)"}
_WORDS |= {"time": "a date and time (2024-02-29 12:30:00)", "zoned": "a time with its zone (2024-02-29T12:30:00Z)"}


class Format(NamedTuple):
    """A format of a column's values.

    Attributes:
      kinds: kinds of columns whose values have this format.
      pattern: regular expression that fields of this format match.
      alike: regular expression of similar fields, which can't be read.
      expects: description of a valid field, for people.
    """

    kinds: tuple[str, ...]
    pattern: str
    alike: str
    expects: str


_FORMATS = {
    "numbers": Format(
        ("int", _BEYOND, "float"),
        NUMBER,
        _FORMATTED,
        "a number (1234.5, without decimal comma, thousands separators, % or currency)",
    ),
    "dates": Format(("date", "time", "zoned"), _DATE, "", "a date (2024-02-29 or 2024-02-29 12:30:00)"),
}


class Unfit(ValueError):
    """A field does not have its column's kind."""

    def __init__(self, row: int, field: str):
        super().__init__(field)
        self.row, self.field = row, field


class Converter:
    """Converts a column's fields to values of a kind: "int", "float", "float32", "date", "time", "zoned" or "text".

    Args:
      pattern: regular expression that fields must match; numbers must also be finite. "" accepts all fields, and no
        missing values.
      expects: description of a valid field, for people; "" is the kind's.

    Attributes:
      type: `pyarrow` type of the values.
    """

    def __init__(self, kind: str, pattern: str = "", expects: str = ""):
        import pyarrow as pa

        self._kind, self._pattern, self._pa = kind, pattern, pa
        self.expects = expects or _WORDS.get(kind, "text")
        self.type = {
            "int": pa.int64(),
            "float": pa.float64(),
            "float32": pa.float32(),
            "date": pa.date32(),
            "time": pa.timestamp("us"),
            "zoned": pa.timestamp("us", "UTC"),
        }.get(kind, pa.string())
        self._parses = pa.float64() if kind == "float32" else self.type  # as Python and NumPy round

    def convert(self, fields) -> Any:
        """Converts an array of text; except as text, `MISSING_WORDS` are missing values. Raises `Unfit`."""
        import pyarrow.compute as pc

        if self._pattern:
            self._check(fields, pc.match_substring_regex(fields, self._pattern))
        if self._kind == "text":
            return fields
        is_gone = _missing_mask(fields)
        if pc.any(is_gone).as_py():
            fields = pc.if_else(is_gone, None, fields)
        try:
            if self._kind == "int" and pc.any(pc.match_substring(fields, "x", ignore_case=True)).as_py():
                raise self._pa.ArrowInvalid("hexadecimal")
            values = fields.cast(self._parses)
        except self._pa.ArrowInvalid:
            parsed = [
                None if field is None else self._parse_field(row, field) for row, field in enumerate(fields.to_pylist())
            ]
            values = self._pa.array(parsed, self._parses)
        if self.type != self._parses:
            values = values.cast(self.type, safe=False)
        if self._pattern and self._pa.types.is_floating(self.type):
            self._check(fields, pc.fill_null(pc.is_finite(values), False))
        return values

    def unfit(self, fields) -> list[int]:
        """Returns which fields of an array of text `convert` rejects."""
        try:
            self.convert(fields)
            return []
        except Unfit:
            # By halves: few fields are unfit, and `pyarrow` converts the others fast.
            half = len(fields) // 2
            return [*self.unfit(fields[:half]), *(half + row for row in self.unfit(fields[half:]))] if half else [0]

    def _check(self, fields, is_fit) -> None:
        row = self._pa.compute.index(is_fit, False).as_py()
        if row >= 0:
            raise Unfit(row, fields[row].as_py())

    def _parse_field(self, row: int, field: str) -> Any:
        try:
            if self._kind in ("int", "float", "float32"):
                return integer(field) if self._kind == "int" else number(field)
            return self._pa.array([field]).cast(self.type)[0].as_py()
        except (ValueError, self._pa.ArrowInvalid):
            raise Unfit(row, field) from None


class InferredType(NamedTuple):
    """The inferred kind of a column.

    Attributes:
      why: the reason why fields that look like another kind are text.
      odd: if most fields have another format: (index, text) of the first that does not, and the expectation.
    """

    kind: str
    why: str
    odd: tuple[int, str, str] | None


class Finder:
    """Infers the kind of a column from all its fields.

    Args:
      kind: if it is decided; None infers it.
    """

    def __init__(self, kind: str | None):
        import pyarrow as pa

        self._pa = pa
        self._kind = kind
        self._why = AS_TEXT if kind else ""
        self._is_decided = kind is not None
        self._seen = self._present = 0  # fields; fields with a value
        self._counts = dict.fromkeys(_FORMATS, 0)
        self._odd: dict[str, tuple[int, str]] = {}  # the first field without a format
        self._marker = ""

    def add(self, fields) -> None:
        """Adds the next fields, an array of text."""
        import pyarrow.compute as pc

        first, self._seen = self._seen, self._seen + len(fields)
        if self._is_decided:
            return
        is_gone = _missing_mask(fields)
        present = fields.filter(pc.invert(is_gone)) if pc.any(is_gone).as_py() else fields
        if len(present) < len(fields) and not self._marker:
            self._marker = next((field for field in fields.filter(is_gone).unique().to_pylist() if field.strip()), "")
        if not len(present):
            return
        kind = next((kind for kind in _NEXT.get(self._kind, ()) if self._fits(kind, present)), "text")
        if (
            kind in ("text", *_FORMATS["numbers"].kinds)
            and pc.any(pc.match_substring_regex(present, _LEADING_ZERO)).as_py()
        ):
            kind, self._why, self._is_decided = "text", "leading zeros", True
        self._kind = kind
        self._present += len(present)
        for name, format in _FORMATS.items():
            if kind == "text":
                self._count(name, fields, is_gone, first)
            elif kind in format.kinds:
                self._counts[name] += len(present)
            else:
                at = pc.index(is_gone, self._pa.scalar(False)).as_py()
                self._odd.setdefault(name, (first + at, fields[at].as_py()))
        self._is_decided |= self._present > _SETTLED and kind == "text" and not self._format()

    def end(self) -> InferredType:
        if self._kind == _BEYOND:
            return InferredType("text", "integers beyond int64", None)
        if self._kind not in (None, "text"):
            return InferredType(self._kind, "", None)
        format = "" if self._is_decided else self._format()
        marker = f"{self._marker.strip()!r} is a word like others" if self._marker and self._kind else ""
        if format and format not in self._odd:
            return InferredType("text", f"not {format} of one kind", None)
        return InferredType(
            "text", self._why or marker, (*self._odd[format], _FORMATS[format].expects) if format else None
        )

    def _format(self) -> str:
        """Returns the format of most fields; "" for text."""
        for name, count in self._counts.items():
            if count and count >= _PER_OTHER * (self._present - count):
                return name
        return ""

    def _count(self, name: str, fields, is_gone, first: int) -> None:
        """Counts fields of a format, and keeps the first that has another."""
        import pyarrow.compute as pc

        format = _FORMATS[name]
        is_plain = pc.or_(is_gone, pc.match_substring_regex(fields, format.pattern))
        self._counts[name] += pc.sum(is_plain).as_py() - pc.sum(is_gone).as_py()
        if format.alike:
            is_odd = pc.and_not(pc.match_substring_regex(fields, format.alike), is_plain)
            self._counts[name] += pc.sum(is_odd).as_py()
        if name not in self._odd and (at := pc.index(is_plain, self._pa.scalar(False)).as_py()) >= 0:
            self._odd[name] = first + at, fields[at].as_py()

    def _fits(self, kind: str, fields) -> bool:
        import pyarrow.compute as pc

        if len(fields) > _FIRST and not self._fits(kind, fields[:_FIRST]):  # most misfits show early
            return False
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


def _missing_mask(fields) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(pc.utf8_trim_whitespace(fields), pa.array(MISSING_WORDS))


def integer(field: str) -> int:
    """Parses an integer; raises ValueError if it is not one, or beyond int64."""
    value = int(field)
    if "_" in field or not -(2**63) <= value < 2**63:
        raise ValueError(field)
    return value


def number(field: str) -> float:
    """Parses a number; raises ValueError if it is not one."""
    if "_" in field:
        raise ValueError(field)
    return float(field)
