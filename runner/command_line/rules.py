"""The type, range or rule of each flag's values, in text as in Python. Nothing here starts TensorFlow.

absl's parsers are not used: they take `nan`, `0x10` and `1_0` for numbers. And they know only text, not values of
Python, JSON and YAML, which keep the same rules here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from ...engine.arguments import INT32, Interval
from ...engine.metrics.monitored import Monitored
from ..failures import UsageError, nearest
from .values import boolean, short
from .values import number as number_of

_OTHER_SYSTEM = "[a-z0-9]+://"  # begins a path of a file system that is not mounted: gs://
_EPOCHS = Interval(above=0, upper=1e9)
Rule = Callable[[str], None]  # raises ValueError with the reason, for text that breaks it


class OtherTypeError(ValueError):
    """A value's type is not one that a flag takes."""


class UntypedText(str):
    """Text of a command line or of YAML; its type is that of the argument it is for."""


class ValueType:
    """The type of a flag's values.

    Attributes:
      expected: description of a valid value, e.g. "a number from 0 to 1".
      choices: all the values, if they are few.
    """

    expected: str
    choices: Collection[str] = ()

    def coerce(self, value: Any) -> Any:
        """Converts a value, or its text, to the flag's type.

        Raises:
          OtherTypeError: the value is of another type.
          ValueError: it can't be used; the message has the reason.
        """
        raise NotImplementedError


class Boolean(ValueType):
    """True or false."""

    expected = "true or false"

    def coerce(self, value: Any) -> bool:
        """See `ValueType`; 0 and 1 are taken too."""
        if isinstance(value, str):
            try:
                return boolean(value)
            except ValueError:
                raise ValueError(f"it takes {self.expected}") from None
        if not isinstance(value, Integral) or value not in (0, 1):
            raise OtherTypeError
        return bool(value)


class Number(ValueType):
    """A number of an interval, also as text; no bool, which Python counts among the numbers."""

    def __init__(self, **ends: Any):
        self.interval = Interval(**ends)
        self.expected = str(self.interval)

    def coerce(self, value: Any) -> float:
        whole = self.interval.whole
        if isinstance(value, str):
            try:
                value = number_of(value, whole)
            except ValueError:
                raise ValueError(f"it takes {self.expected}") from None
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise OtherTypeError
        if (whole and not isinstance(value, Integral)) or value not in self.interval:
            raise ValueError(f"it takes {self.expected}")
        return int(value) if whole else float(value)


class Integer(Number):
    """An integer of 32 bits at most, which TensorFlow's counters take."""

    def __init__(self, lower: int, upper: int = INT32):
        super().__init__(lower=lower, upper=upper, whole=True)


class AutoOrNumber(Number):
    """The word auto, or a number of an interval."""

    def __init__(self, **ends: Any):
        super().__init__(**ends)
        self.expected = f"auto, or {self.expected}"

    def coerce(self, value: Any) -> Any:
        return "auto" if value == "auto" else super().coerce(value)


class Text(ValueType):
    """Text that keeps a rule.

    Args:
      expected: description of the text, e.g. "a regular expression".
      rule: rule that a text must satisfy; None takes any that is not empty.
    """

    def __init__(self, expected: str, rule: Rule | None = None, may_be_empty: bool = False):
        self.expected, self._rule, self._may_be_empty = expected, rule, may_be_empty

    def coerce(self, value: Any) -> str:
        """See `ValueType`; with a rule it may be a number: a step, or a GPU's."""
        if self._rule and isinstance(value, Integral) and not isinstance(value, bool):
            value = str(value)
        text = _text(value)
        if not (self._may_be_empty and text == ""):
            as_text(text)
            if self._rule:
                self._rule(text)
        return text


class Path(ValueType):
    """A path, which becomes one from the root: see `absolute`.

    Args:
      may_be_remote: whether it may be of any file system that TensorFlow knows: gs://bucket/run.
    """

    expected = "a path"

    def __init__(self, may_be_remote: bool = False):
        self._may_be_remote = may_be_remote

    def coerce(self, value: Any) -> str:
        text = _text(value)
        if self._may_be_remote and re.match(f"{_OTHER_SYSTEM}.", text):
            return text
        if re.match(_OTHER_SYSTEM, text):
            raise ValueError("it is not a path of a mounted file system; mount the bucket or give a local folder")
        return absolute(as_text(text))


class FilePaths(ValueType):
    """Paths of files: folders, files or globs, of any file system that TensorFlow knows, with commas between."""

    expected = "a path"

    def coerce(self, value: Any) -> str:
        """See `ValueType`; a list has one path each."""
        if isinstance(value, (list, tuple)):
            parts = [_text(path) for path in value]
            if wrong := next((part for part in parts if "," in part), None):
                raise ValueError(f"{wrong} has a comma in it, which separates values; use another name")
            value = ",".join(parts)
        parts = as_text(_text(value)).split(",")
        return ",".join(absolute(part) if part and not re.match(_OTHER_SYSTEM, part) else part for part in parts)


class OneOf(ValueType):
    """One of some names, or of those that a function returns on use."""

    def __init__(self, names: Collection[str] | Callable[[], Collection[str]]):
        self._names = names

    @property
    def choices(self) -> Collection[str]:  # type: ignore[override]
        return self._names() if callable(self._names) else self._names

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"one of {', '.join(self.choices)}"

    def coerce(self, value: Any) -> str:
        if (text := _text(value)) not in self.choices:
            raise ValueError(f"it takes {self.expected}")
        return text


class Argument(ValueType):
    """NAME=VALUE, which becomes a pair."""

    expected = "NAME=VALUE"

    def coerce(self, value: Any) -> tuple[str, UntypedText]:
        name, separator, text = as_text(_text(value)).partition("=")
        if not name or not separator:
            raise ValueError("it has no value; write NAME=VALUE")
        return name, UntypedText(text)


def _text(value: Any) -> str:
    """Returns text, or a path as text. Raises `OtherTypeError`."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise OtherTypeError
    return str(text)


ARGUMENT = Argument()


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """The properties of a flag besides its name, type and default.

    Attributes:
      help: a line for --help.
      group: heading in --help; "" for a flag that is not a setting of a run, but of another command.
      use: the runs that it applies to, if not all; (another flag, values of it), or, without
        values, any but the other's default.
      several: whether it is repeatable, a list.
      decides: whether it decides a run's numbers: a run_dir is resumed only with the same value.
      of_call: whether it is of one call: a call that reads a run does not take it over from it.
      may_differ: whether workers that train together may have different values.
      may_be_elsewhere: whether workers need only agree on setting it: a folder's name may differ between hosts.
      is_period: whether it is the interval of an action that reads the weights.
    """

    kind: ValueType
    help: str
    group: str = ""
    use: tuple[str, ...] | None = None
    several: bool = False
    decides: bool = False
    of_call: bool = False
    may_differ: bool = False
    may_be_elsewhere: bool = False
    is_period: bool = False

    @property
    def takes_arguments(self) -> bool:
        """Whether its values are of the form NAME=VALUE."""
        return self.kind is ARGUMENT


def flag(kind: ValueType, default: Any, help: str, **info: Any) -> Any:
    """Makes a field of a command's flags; `info` is as in `FlagInfo`."""
    metadata = {"info": FlagInfo(kind, help, **info)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields(command: type) -> dict[str, dataclasses.Field]:
    """Returns the fields of a command's flags, by name."""
    return {field.name: field for field in dataclasses.fields(command) if "info" in field.metadata}


def default_value(field: dataclasses.Field) -> Any:
    """Returns a flag's default."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def coerce(field: dataclasses.Field, value: Any) -> Any:
    """Converts a flag's value, text or a value of Python, JSON or YAML, to the flag's type. Raises `UsageError`.

    The values of NAME=VALUE arguments are converted later, by the model, input, ... that takes them.
    """
    info: FlagInfo = field.metadata["info"]
    if info.takes_arguments and isinstance(value, Mapping):
        return {_coerce_one(field, name, Text("a name")): argument for name, argument in value.items()}
    items = value if isinstance(value, (list, tuple)) else [value]
    if info.takes_arguments:
        values: dict[str, Any] = {}
        for name, argument in (_coerce_one(field, item, info.kind) for item in items):
            if name in values:
                raise UsageError(f"{field.name} {name} is set twice, {values[name]} and {argument}; omit one")
            values[name] = argument
        return values
    if info.several:
        return [_coerce_one(field, item, info.kind) for item in items]
    return _coerce_one(field, value, info.kind)


def _coerce_one(field: dataclasses.Field, value: Any, kind: ValueType) -> Any:
    name = field.name if field.metadata["info"].group else f"--{field.name}"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy's
        value = value.item()
    try:
        return kind.coerce(value)
    except OtherTypeError:
        wrong = f"{name}={value!r:.60} is a {type(value).__name__}"
        raise UsageError(f"{wrong}, and not one value; give {kind.expected}") from None
    except ValueError as error:
        if isinstance(value, str) and not value:
            fix = f"give {kind.expected}, or leave it out"
            raise UsageError(f"{name} is empty (a variable that is not set?); {fix}") from None
        if kind.choices:
            raise UsageError(f"{name}={value} is unknown; {nearest(value, kind.choices)}") from None
        shown = value if isinstance(value, str) else short(value)
        command = "crankshaft train " if field.metadata["info"].group else ""
        raise UsageError(f"{name}={shown} can't be used: {error}; see {command}--help") from None


def absolute(path: str) -> str:
    """Returns the absolute path, with a leading ~ expanded, which a shell does not expand after --NAME=.

    A program that changes its folder later thus finds, or writes, the file that was meant. `..` stays: it may follow a
    link. Raises ValueError where the current folder is gone, or Python and TensorFlow would name different files.
    """
    try:
        # pathlib drops a separator at the end, by which a folder is meant where there may be a file.
        whole = str(pathlib.Path(os.path.expanduser(path)).absolute()) + os.sep * path[1:].endswith(os.sep)
    except OSError:
        raise ValueError("it is relative to the current folder, which was removed; give a path from /") from None
    if not whole.isascii():
        _check_encoding()
    return as_text(whole)


def as_text(argument: str) -> str:
    """Returns the text; raises ValueError for text that is empty, or that no file of a run's can hold.

    Python has a byte of the command line that is not UTF-8 as half of a surrogate pair (PEP 383).
    """
    if not argument or "\0" in argument:
        raise ValueError("it has a null character in it" if argument else "it is empty")
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        _check_encoding()
        wrong = ascii(argument[error.start : error.end])[1:-1].replace("\\udc", "\\x")
        raise ValueError(f"it has {wrong} in it, which is not UTF-8; rename it, or use another") from None
    return argument


def _check_encoding() -> None:
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise ValueError(
            f"Python names files in {encoding} here, by the locale, and TensorFlow in UTF-8; set PYTHONUTF8=1 before "
            "the program starts, or use ASCII characters"
        )


def check_regular_expression(text: str) -> None:
    """Checks, as a rule, that the text is a regular expression of Python's `re`."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression ({error}); use e.g. bias|gamma") from None


def check_freeze(text: str) -> None:
    """Checks, as a rule, that the text is REGEX or REGEX:EPOCHS."""
    pattern, epochs = parse_freeze(text)
    if not pattern:
        raise ValueError("it has no regular expression; use e.g. backbone or backbone:3")
    check_regular_expression(pattern)
    if epochs is not None and epochs not in _EPOCHS:
        raise ValueError(f"its epochs are not {_EPOCHS}; use e.g. backbone:3")


def parse_freeze(text: str) -> tuple[str, float | None]:
    """Splits REGEX or REGEX:EPOCHS into (regular expression, epochs); None without epochs, nan if they are no number.

    The text after the last colon is epochs if it has only letters, digits and signs of numbers: "(?:a|b)" has none.
    """
    pattern, colon, epochs = text.rpartition(":")
    if not colon or not re.fullmatch(r"[\w.+-]*", epochs):
        return text, None
    try:
        return pattern, number_of(epochs, False)
    except ValueError:
        return pattern, math.nan


def matching(pattern: str, otherwise: str) -> Rule:
    """Returns a rule that all of the text matches a pattern, in which . is any character."""

    def rule(text: str) -> None:
        if not re.fullmatch(pattern, text, re.DOTALL | re.ASCII):
            raise ValueError(otherwise)

    return rule


def check_monitored(text: str) -> None:
    """Raises ValueError if a text is not a metric to monitor."""
    try:
        Monitored.parse(text)
    except ValueError:
        raise ValueError(
            "it is not a metric's name; use eval_loss or train_loss, or with its direction e.g. max:eval_score"
        ) from None


def check_ip_address(text: str) -> None:
    """Raises ValueError if a text is not an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("it is not an IP address; use e.g. 10.0.0.5") from None


check_host_name = matching(
    "[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?",
    "it is not a host's name; use e.g. hub.example.org, without https:// and a port",
)


def check_mesh(text: str) -> None:
    """Checks, as a rule, that the text is a mesh: sizes of its axes by name, each once."""
    sizes = re.findall(r"(?:^|,)(data|model):([1-9][0-9]{0,3})(?=,|$)", text)
    if ",".join(f"{name}:{size}" for name, size in sizes) != text or len({name for name, _ in sizes}) < len(sizes):
        raise ValueError("it is not a mesh; use e.g. data:2,model:2")


def check_buckets(text: str) -> None:
    """Checks, as a rule, that the text is buckets of lengths: axis:boundaries[:most]."""
    _, boundaries, most = parse_buckets(text)
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *boundaries))):
        raise ValueError("its boundaries do not ascend from 1 on; use e.g. 0:100,200,400")
    if most is not None and most < boundaries[-1]:
        raise ValueError(f"its bound of {most} is below the last boundary, so that no example fits; use a larger one")


def parse_buckets(text: str) -> tuple[int, tuple[int, ...], int | None]:
    """Parses buckets of lengths to (axis, boundaries, bound or None). Raises ValueError."""
    found = re.fullmatch(r"(\d{1,4}):(\d{1,9}(?:,\d{1,9})*)(?::(\d{1,12}))?", text)
    if not found:
        raise ValueError("it is not axis:boundaries; use e.g. 0:100,200,400")
    return int(found[1]), tuple(map(int, found[2].split(","))), int(found[3]) if found[3] else None


def mesh_shape(text: str | None) -> dict[str, int]:
    """Parses a mesh to the sizes of its axes by name."""
    return {name: int(size) for name, size in (axis.split(":") for axis in text.split(","))} if text else {}
