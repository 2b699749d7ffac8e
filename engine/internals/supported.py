"""Refuses libraries that are older than what this package is tested with."""

import importlib

from ..errors import UsageError

LEAST = {"tensorflow": "2.19", "keras": "3.12"}


def refuse_old_libraries() -> None:
    """Raises `UsageError` where this process has loaded an older library, though a newer one may be installed since."""
    for name, least in LEAST.items():
        loaded = importlib.import_module(name).__version__
        if [*map(int, loaded.split(".")[:2])] < [*map(int, least.split("."))]:
            raise UsageError(
                f"this process has loaded {name} {loaded}, and Crankshaft needs {least} or newer; install that (pip "
                f"install -U {name}), unless it is by now, and restart the kernel, or the program"
            )
