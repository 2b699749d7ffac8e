"""The imports of TensorFlow and Keras, most of a process's start time. Host code."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Disables garbage collection within: it would visit a million objects of imports, which stay, again and again."""
    collects, starts = gc.isenabled(), "tensorflow" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if starts and not gc.get_freeze_count():  # else another program has configured the collector
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation, which is seldom collected
        if collects:
            gc.enable()


@functools.cache  # counting frozen objects takes a time proportional to their number
def keep() -> None:
    """Excludes all current objects, mainly modules, from garbage collection: for a process that the run owns."""
    if not gc.get_freeze_count():
        gc.freeze()
