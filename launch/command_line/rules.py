"""The values that a flag may have: each flag has a range or a rule, applied as the command line is read.

A value outside is one line. For all of this project's commands; nothing here starts TensorFlow.
"""

from __future__ import annotations

import ipaddress
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

from absl import flags

from ...engine.internals.arguments import Interval
from ...engine.metrics.monitored import Monitored
from ..errors import UsageError, nearest
from .values import number as number_of

flags.disclaim_key_flags()  # a flag belongs to the module that defines it by this one

INT32 = 2**31 - 1
_OTHER_SYSTEM = "[a-z0-9]+://"  # begins a path of a file system that is not mounted: gs://
_EPOCHS = Interval(above=0, upper=1e9)
Rule = Callable[[str], None]  # raises ValueError, which says why, for text that breaks it


class _Parser(flags.ArgumentParser):
    """A flag's parser. `wants` says what the flag takes, e.g. "a number from 0 to 1"."""

    wants: str


class Number(_Parser):
    """Parses a number of an interval."""

    def __init__(self, interval: Interval):
        self.interval = interval
        self.wants = str(interval)

    def parse(self, argument: str | float) -> float:
        try:
            value = number_of(argument, self.interval.whole) if isinstance(argument, str) else argument
        except ValueError:
            raise ValueError(f"it takes {self.wants}") from None
        if value not in self.interval:
            raise ValueError(f"it takes {self.wants}")
        return value if self.interval.whole else float(value)

    def flag_type(self) -> str:
        return "int" if self.interval.whole else "float"


def absolute(path: str) -> str:
    """Returns a path from the root, with a leading ~ expanded, which a shell leaves as it is after --NAME=.

    A program that changes its folder later thus finds, or writes, the file that was meant. `..` stays: it may follow a
    link. Raises ValueError where the current folder is gone.
    """
    try:
        whole = str(pathlib.Path(os.path.expanduser(path)).absolute()) + os.sep * path[1:].endswith(os.sep)
    except OSError:
        raise ValueError("it is relative to the current folder, which was removed; give a path from /") from None
    return as_text(whole)


class Path(_Parser):
    """Parses a path: see `absolute`."""

    wants = "a path"

    def parse(self, argument: str) -> str:
        if re.match(_OTHER_SYSTEM, argument):
            raise ValueError("it is not a path of a mounted file system; mount the bucket or give a local folder")
        return absolute(as_text(argument))


class Folder(Path):
    """Parses the path of a folder of any file system that TensorFlow knows: gs://bucket/run."""

    def parse(self, argument: str) -> str:
        return argument if re.match(f"{_OTHER_SYSTEM}.", argument) else super().parse(argument)


class Files(_Parser):
    """Parses what names files: a folder, a file or a glob, of any file system that TensorFlow knows, with commas."""

    wants = "a path"

    def parse(self, argument: str) -> str:
        parts = as_text(argument).split(",")
        return ",".join(absolute(part) if part and not re.match(_OTHER_SYSTEM, part) else part for part in parts)


class Text(_Parser):
    """Parses text that keeps a rule.

    Args:
      wants: what it is, e.g. "a regular expression".
      rule: None takes any that is not empty.
      may_be_empty: whether it may be empty.
    """

    def __init__(self, wants: str, rule: Rule | None, may_be_empty: bool):
        self.wants, self._rule, self._may_be_empty = wants, rule, may_be_empty

    def parse(self, argument: str) -> str:
        if not (self._may_be_empty and argument == ""):
            as_text(argument)
            if self._rule:
                self._rule(argument)
        return argument


class Names(flags.ListParser):
    """Parses some of the known names, separated by commas."""

    def __init__(self, known: Collection[str]):
        super().__init__()
        self._known = known
        self.wants = f"some of {', '.join(known)}"

    def parse(self, argument: str | list[str]) -> list[str]:
        names = super().parse(argument)
        for name in names or [""]:
            if name not in self._known:
                raise ValueError(f"{name or 'nothing'} is unknown; {nearest(name, self._known)}")
        return names


class OneOf(flags.EnumParser):
    """One of the names that there are when it is asked, as absl's own has it of names that stay as they are."""

    def __init__(self, known: Callable[[], Collection[str]]):
        self.case_sensitive = True
        self._known = known

    @property
    def enum_values(self) -> list[str]:
        return list(self._known())


def as_text(argument: str) -> str:
    """Returns the text; raises ValueError for text that is empty, or that no file of a run's can hold.

    Python has a byte of the command line that is not UTF-8 as half of a surrogate pair (PEP 383).
    """
    if not argument or "\0" in argument:
        raise ValueError("it has a null character in it" if argument else "it is empty")
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        wrong = ascii(argument[error.start : error.end])[1:-1].replace("\\udc", "\\x")
        raise ValueError(f"it has {wrong} in it, which is not UTF-8; rename it, or use another") from None
    return argument


def regular_expression(text: str) -> None:
    """Checks, as a rule, that the text is a regular expression of Python's `re`."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression ({error}); use e.g. bias|gamma") from None


def freezing(text: str) -> None:
    """Checks, as a rule, that the text is REGEX or REGEX:EPOCHS."""
    pattern, epochs = frozen(text)
    if not pattern:
        raise ValueError("it has no regular expression; use e.g. backbone or backbone:3")
    regular_expression(pattern)
    if epochs is not None and epochs not in _EPOCHS:
        raise ValueError(f"its epochs are not {_EPOCHS}; use e.g. backbone:3")


def frozen(text: str) -> tuple[str, float | None]:
    """Returns (regular expression, epochs) of REGEX or REGEX:EPOCHS: None without, nan where they are not a number.

    What comes after the last colon is epochs if it is letters, digits and signs of numbers alone: "(?:a|b)" has none.
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


def monitored(text: str) -> None:
    """Raises ValueError for what is not a metric to monitor."""
    try:
        Monitored.parse(text)
    except ValueError:
        raise ValueError(
            "it is not a metric's name; use eval_loss or train_loss, or with its direction e.g. max:eval_score"
        ) from None


def ip_address(text: str) -> None:
    """Raises ValueError for what is not an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("it is not an IP address; use e.g. 10.0.0.5") from None


def mesh(text: str) -> None:
    """Checks, as a rule, that the text is a mesh: sizes of its axes by name, each once."""
    sizes = re.findall(r"(?:^|,)(data|model):([1-9][0-9]{0,3})(?=,|$)", text)
    if ",".join(f"{name}:{size}" for name, size in sizes) != text or len({name for name, _ in sizes}) < len(sizes):
        raise ValueError("it is not a mesh; use e.g. data:2,model:2")


def mesh_shape(text: str | None) -> dict[str, int]:
    """Returns the sizes of a mesh's axes that text gives, by name."""
    return {name: int(size) for name, size in (axis.split(":") for axis in text.split(","))} if text else {}


def whole(name, default, help, *, lower: int, upper: int = INT32, flag_values=flags.FLAGS) -> None:
    """Defines a flag of an integer; see `absl.flags.DEFINE`, also for the others."""
    _define(Number(Interval(lower=lower, upper=upper, whole=True)), name, default, help, flag_values)


def number(name, default, help, *, flag_values=flags.FLAGS, **ends: Any) -> None:
    """Defines a flag of a number; `ends` are those of its `Interval`."""
    _define(Number(Interval(**ends)), name, default, help, flag_values)


def path(name, default, help, *, flag_values=flags.FLAGS) -> None:
    """Defines a flag of a path."""
    _define(Path(), name, default, help, flag_values)


def folder(name, default, help, *, flag_values=flags.FLAGS) -> None:
    """Defines a flag of a folder; see `Folder`."""
    _define(Folder(), name, default, help, flag_values)


def files(name, default, help, *, flag_values=flags.FLAGS) -> None:
    """Defines a flag that names files; see `Files`."""
    _define(Files(), name, default, help, flag_values)


def text(
    name, default, help, *, wants: str, rule: Rule | None = None, may_be_empty: bool = False, flag_values=flags.FLAGS
) -> None:
    """Defines a flag of text; see `Text`."""
    _define(Text(wants, rule, may_be_empty), name, default, help, flag_values)


def repeated(name, default, help, *, wants: str, rule: Rule, flag_values=flags.FLAGS) -> None:
    """Defines a flag of text that may be given several times; see `Text`."""
    flags.DEFINE_multi(Text(wants, rule, False), flags.ArgumentSerializer(), name, default, help, flag_values)


def arguments(name, default, help, *, flag_values=flags.FLAGS) -> None:
    """Defines a flag of NAME=VALUE that may be given several times."""
    rule = matching(r"[^=]+=.*", "it has no value; write NAME=VALUE")
    repeated(name, default, help, wants="NAME=VALUE", rule=rule, flag_values=flag_values)


def names(name, default, help, *, known: Collection[str], flag_values=flags.FLAGS) -> None:
    """Defines a flag of some of the known names."""
    flags.DEFINE(Names(known), name, default, help, flag_values, flags.CsvListSerializer(","))


def one_of(name, default, help, *, known: Callable[[], Collection[str]]) -> None:
    """Defines a flag of one of the names that there are when it is given."""
    flags.DEFINE(OneOf(known), name, default, help, flags.FLAGS, flags.ArgumentSerializer())


def _define(parser: _Parser, name, default, help, flag_values) -> None:
    flags.DEFINE(parser, name, default, help, flag_values, flags.ArgumentSerializer())


def wanted(flag: flags.Flag) -> str | None:
    """Returns what a flag takes, or None where it takes any text."""
    if flag.boolean:
        return "true or false"
    if choices := getattr(flag.parser, "enum_values", None):
        return f"one of {', '.join(choices)}"
    kinds = {"int": "an integer", "float": "a number"}  # of a script's own flags
    return getattr(flag.parser, "wants", kinds.get(flag.flag_type()))


def explain(error: flags.Error, values: flags.FlagValues) -> UsageError:
    """Turns a value that is wrong or missing into one line."""
    match = re.match(r"flag --(\w+)=", str(error))
    if not match or match[1] not in values:
        return UsageError(f"{' '.join(str(error).split())}; see --help")
    flag = values[match[1]]
    why = str(error.__context__)  # what the parser raised
    value = str(error)[match.end() :].removesuffix(f": {why}")
    wants = wanted(flag)
    if not value:
        cure = f"give {wants}, or leave it out" if wants else "see --help"
        return UsageError(f"--{flag.name} is empty (a variable that is not set?); {cure}")
    if choices := getattr(flag.parser, "enum_values", None):
        return UsageError(f"--{flag.name}={value} is unknown; {nearest(value, choices)}")
    if wants and not isinstance(flag.parser, (_Parser, Names)) and "is not" not in why:  # absl says what it is not
        why = f"it takes {wants}"
    return UsageError(f"--{flag.name}={value} can't be used: {why}; see --help")


MODULE = {"wants": "a name, or the path of a file"}  # of flags that name a module
