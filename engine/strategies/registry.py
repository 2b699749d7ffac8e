"""Strategies by name, including a script's own. Does not start TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import UsageError
from .options import StrategyOptions

if TYPE_CHECKING:
    from .base import Strategy

BUILT_IN = ("one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
CLUSTERED = ("multi_worker", "parameter_server")  # those of several processes, which connect before TensorFlow starts

Maker = Callable[[StrategyOptions], "Strategy"]
_registered: dict[str, Maker] = {}


def register(name: str, maker: Maker) -> None:
    """Registers a strategy of a script's own under a name; before the script calls `crankshaft.main` or `run`.

    Args:
      name: lower-case letters, digits and _; not a built-in's. Your own may be registered again.
      maker: creates the `engine.strategies.base.Strategy`, before anything else uses a device.

    Raises:
      UsageError: the name is not allowed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{name!r} is not a name of a strategy; use lower-case letters, digits and _")
    if name in BUILT_IN:
        raise UsageError(f"the strategy {name} comes with Crankshaft; register yours by another name")
    _registered[name] = maker


def registered(name: str) -> Maker:
    """Returns what a script has registered under a name."""
    return _registered[name]


def names() -> tuple[str, ...]:
    """Returns the names of all strategies."""
    return (*BUILT_IN, *_registered)
