"""A configuration's values as plain JSON and as text, and how two of them differ."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(
    rf"{_WHOLE.pattern}(\.[0-9]*)?(e[+-]?[0-9]+)?|[+-]?\.[0-9]+(e[+-]?[0-9]+)?|[+-]?inf(inity)?|nan", re.IGNORECASE
)

_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "1"), True),
    **dict.fromkeys(("false", "f", "no", "0"), False),
}


def boolean(text: str) -> bool:
    """Reads a word for true or false. Raises ValueError."""
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{text} is neither true nor false")
    return _BOOLEANS[text.lower()]


def guessed(text: str) -> float | bool | str | None:
    """Reads text of no type by its looks: a number, true, false or none; else it is text."""
    for whole in (True, False):
        with contextlib.suppress(ValueError):
            return number(text, whole)
    if text.lower() in ("true", "false"):
        return boolean(text)
    return None if text.lower() == "none" else str(text)


def number(text: str, whole: bool) -> float:
    """Reads a decimal number. Raises ValueError, also for 010, 0x10 and 1_0, which not all read alike."""
    if not (_WHOLE if whole else _NUMBER).fullmatch(text):
        raise ValueError(f"{text} is not a number")
    return int(text) if whole else float(text)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values to those that JSON gives back; others become their names, the same in each process."""

    def name(value) -> Any:
        if isinstance(value, dict):  # these two tf.Module has wrapped, in place where they stand in another
            return dict(value)
        if isinstance(value, tuple):
            return list(value)
        if hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

    return json.loads(json.dumps(values, default=name), parse_constant=str)


def shown(value) -> str:
    """Formats a value that was read from a file as JSON, short enough for a line."""
    return short(json.dumps(value))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lists `name: before -> now` of the deciding values that changed, arguments one by one."""
    changed = []
    for name in [*before, *(n for n in now if n not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += [f"{name} {line}" for line in differences(old, new)]
        elif old != new:
            changed.append(f"{name}: {short(old)} -> {short(new)}")
    return changed


def short(value) -> str:
    """Formats a value as text, short enough for a line."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
