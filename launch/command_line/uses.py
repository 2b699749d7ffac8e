"""Checks flags that only some runs use: to give one to a run that would ignore it is a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import flags

from ..errors import UsageError

# What a flag is for: (another flag, values of it), or, without values, any but the other's default.
Use = tuple[str, ...]


def check(uses: Mapping[str, Use], values: Mapping[str, Any]) -> None:
    """Raises `UsageError` for the first flag that has no use.

    Args:
      uses: the use of each flag that is not for all runs.
      values: the run's, of all flags: a command line may leave some to the run that it reads.
    """
    for name, (other, *choices) in uses.items():
        flag = flags.FLAGS[name]
        is_never = name.endswith("_every_steps") and flag.value == 0  # 0 is obeyed everywhere
        if flag.value == flag.default or is_never:
            continue
        given = "".join(f"--{name}={value} " for value in _each(flag.value))
        found = values[other]
        if not choices and found == flags.FLAGS[other].default:
            raise UsageError(f"{given}has no use without --{other}; give that too, or leave --{name} out")
        if choices and found not in choices:
            cure = " or ".join(f"--{other}={choice}" for choice in choices)
            raise UsageError(f"{given}has no use with --{other}={found}; use {cure}, or leave --{name} out")


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
