"""Keeps the C library's allocator from returning freed memory to the system between steps."""

from __future__ import annotations

import ctypes
import functools

from .. import logging

# mallopt(3), glibc's <malloc.h>: parameter, value.
_MALLOPT = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),  # blocks under 1 GiB come from the heap, not from fresh zeroed pages
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # freed memory stays in the process
    "M_TOP_PAD": (-2, 64 << 20),  # the heap grows by 64 MiB at a time
}


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, so that a step does not fault its temporaries in again. glibc only.

    Must run before TensorFlow allocates.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        logging.debug("allocator left alone: this is not glibc")
        return
    done = {name: bool(mallopt(*setting)) for name, setting in _MALLOPT.items()}
    logging.debug("allocator tuned: %s", done)


@functools.cache
def keep_freed_memory_with_tensorflow() -> None:
    """Tunes the allocator again after TensorFlow has reset it. Call it after TensorFlow has created its devices.

    With its first GeneratorDataset (every distributed iterator has one), TensorFlow 2.21 resets M_TRIM_THRESHOLD to
    128 KiB, once per process. So the first one is created here.
    """
    import tensorflow as tf

    nothing = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=tf.TensorSpec([]))
    for _ in nothing:
        pass
    keep_freed_memory()
