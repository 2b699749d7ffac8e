"""The imports of TensorFlow and Keras, most of what a process's start takes. Host code."""

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
        if starts and not gc.get_freeze_count():  # else somebody has decided what is to be there
            gc.freeze()
            gc.unfreeze()  # all of it into the oldest generation, which collections seldom go through
        if collects:
            gc.enable()


@functools.cache  # to ask whether somebody has frozen anything takes as long as there are such objects
def keep() -> None:
    """Leaves what is there by now out of all collections, modules above all: for a process that is the run's own."""
    if not gc.get_freeze_count():
        gc.freeze()
