"""Checks arguments by name: which ones a function takes, and in which intervals they lie. Runs on the host.

Needs no TensorFlow, so that command lines can be checked before TensorFlow starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import numbers
import re
from collections.abc import Mapping
from typing import Any

from .errors import UsageError


class Expression:
    """Texts that are regular expressions, instead of an `Interval`."""

    def __contains__(self, value: Any) -> bool:
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError, TypeError):
            return False
        return True

    def __str__(self) -> str:
        return "a regular expression"


INT32 = 2**31 - 1
HUGE = 1e30  # far below float32's end at 3.4e38
_TINY = 1.2e-38  # float32's smallest normal number


@dataclasses.dataclass(frozen=True)
class Interval:
    """Numbers between two ends.

    Attributes:
      lower, upper: closed ends.
      above, below: open ends, instead of `lower` or `upper`.
    """

    lower: float | None = None
    upper: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False

    def __post_init__(self):
        if (self.lower is None) == (self.above is None) or (self.upper is None) == (self.below is None):
            raise UsageError(f"{self} needs one lower end and one upper end")

    def __contains__(self, value: Any) -> bool:
        """Returns whether a value is a number in the interval; NaN is in none."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value  # type checkers don't know that `numbers.Real` compares
        above = number > self.above if self.lower is None else number >= self.lower
        return bool(above and (number < self.below if self.upper is None else number <= self.upper))

    def __str__(self) -> str:
        """Describes the interval: "a number from 0 to below 1", "an integer from 1 to 8"."""
        shown = str if self.whole else "{:g}".format
        low = f"from {shown(self.lower)}" if self.above is None else f"above {shown(self.above)}"
        high = f"to {shown(self.upper)}" if self.below is None else f"to below {shown(self.below)}"
        return f"{'an integer' if self.whole else 'a number'} {low} {high}"


FROM_ZERO = Interval(lower=0, upper=HUGE)
POSITIVE = Interval(lower=_TINY, upper=HUGE)
FINITE = Interval(lower=-HUGE, upper=HUGE)
DECAY = Interval(lower=0, below=1)  # of an average; with 1 it would never change
COUNT = Interval(lower=1, upper=INT32, whole=True)


def outside(intervals: Mapping[str, Interval | Expression], name: str, value: Any) -> str | None:
    """Returns the problem of an argument's value, or None: "beta_1=2 is not a number from 0 to below 1".

    Args:
      value: a number, or a tuple or list of them. None (the rule's choice) is always valid.
    """
    interval = intervals.get(name)
    if interval is None or value is None:
        return None
    if value in ((), []):
        return f"{name}= is empty and not {interval}"
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    if not all(number in interval for number in numbers):
        return f"{name}={','.join(map(str, numbers)):.60} is not {interval}"
    return None


def nearest(misspelt: str, names, otherwise: str | None = None) -> str:
    """Suggests 'did you mean X?' if one of `names` is similar, else returns `otherwise`, or lists all of them."""
    names = list(names) if isinstance(names, (list, tuple)) else sorted(names)  # a list begins with the most frequent
    word = misspelt.lower()
    whole = [name for name in names if f"_{name}".endswith(f"_{word}")]  # batch_size: global_batch_size
    initials = [name for name in names if len(word) > 1 and "".join(part[:1] for part in name.split("_")) == word]
    near = list(dict.fromkeys([*initials, *whole, *difflib.get_close_matches(word, names, n=3, cutoff=0.6)]))[:3]
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"use one of {', '.join(names)}"


def unknown(kind, name, names):
    """Returns a ValueError that names an unknown `kind` and the nearest of the `names` that there are."""
    return UsageError(f"unknown {kind} {name!r}; {nearest(name, names)}")


def parameters(function):
    """Returns the keyword parameters of `function`, or of a class, by name.

    A constructor with `**arguments` passes them to its base's.
    """
    classes = function.__mro__[:-1] if inspect.isclass(function) else ()
    named: dict[str, inspect.Parameter] = {}
    for makes in [vars(c)["__init__"] for c in classes if "__init__" in vars(c)] if classes else [function]:
        taken = inspect.signature(makes).parameters.values()
        for one in taken:
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name != "self":
                named.setdefault(one.name, one)
        if not any(one.kind is one.VAR_KEYWORD for one in taken):
            break
    return named


def check_arguments(owner, arguments, names, intervals):
    """Raises a ValueError for the first of `arguments` that is not among `names`, or outside its interval."""
    for name, value in arguments.items():
        if name not in names:
            raise unknown(f"argument of {owner}", name, names)
        if fault := outside(intervals, name, value):
            raise UsageError(f"{owner}: {fault}")
