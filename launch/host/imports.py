"""The imports of TensorFlow and Keras, most of a process's start time. Host code."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Looks for no garbage within: imports make a million objects that stay, gone through again and again otherwise."""
    collects, starts = gc.isenabled(), "tensorflow" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if starts and not gc.get_freeze_count():  # else another program has configured the collector
            gc.freeze()
            gc.unfreeze()  # all of it into the oldest generation, which collections seldom go through
        if collects:
            gc.enable()


@functools.cache  # to ask whether somebody has frozen anything takes as long as there are such objects
def keep() -> None:
    """Excludes all current objects, mainly modules, from garbage collection: for a process that the run owns."""
    if not gc.get_freeze_count():
        gc.freeze()
