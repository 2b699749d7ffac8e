"""Prepares this process's environment before TensorFlow starts: threads, vectors, the allocator."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping

from ...engine import logging
from ...engine.machine import allocator, cpus
from ...engine.machine.files import temporary_folder
from ...engine.machine.threads import PROCESS
from ..failures import UsageError
from . import imports

# The variables that set the number of threads: TensorFlow's (its process_util.cc, local_device.cc), other libraries'.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
VECTOR_WIDTH = "--xla_cpu_prefer_vector_width"


def prepare(tunes_allocator: bool = True) -> None:
    """Sets this process's environment before TensorFlow starts: threads, vector width, optionally the allocator.

    Keras's backend is chosen when `engine` is imported.

    Raises:
      UsageError: TF_USE_LEGACY_KERAS makes tf.keras Keras 2, or no temporary file, which TensorFlow's import needs, can
        be written.
    """
    if (legacy := os.environ.get("TF_USE_LEGACY_KERAS")) in ("1", "true", "True"):  # as TensorFlow reads it
        raise UsageError(f"TF_USE_LEGACY_KERAS={legacy} asks for Keras 2, and models here are of Keras 3; unset it")
    temporary_folder()
    with PROCESS:
        imports.check_variables()
        fit_threads(os.environ, cpus.usable_cores(), len(cpus.usable_cpus([os.getpid()])))
        if cpus.has_fast_wide_vectors():
            widen_vectors(os.environ)
        if tunes_allocator and not sets_allocator(os.environ):
            allocator.keep_freed_memory()


def sets_allocator(variables: Mapping[str, str]) -> bool:
    """Returns whether variables such as MALLOC_TRIM_THRESHOLD_ configure glibc's allocator; see mallopt(3)."""
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in variables)


def fit_threads(variables: MutableMapping[str, str], usable: float, cores: int) -> None:
    """Limits threads to the cores that a CPU quota leaves; TensorFlow and other libraries take one for each core seen.

    More threads would use the quota up and then stand still, all at once. Has to run before TensorFlow starts.

    Args:
      variables: the process's environment variables; values that are set stay.
      usable: cores that the process may use; a part of one counts as one.
      cores: number of cores that the process sees.
    """
    threads = math.ceil(usable)
    if threads < cores:
        logging.debug("a CPU quota leaves %g of %d cores: %d threads", usable, cores, threads)
        for name in _THREADS:
            variables.setdefault(name, str(threads))


def widen_vectors(variables: MutableMapping[str, str]) -> None:
    """Makes XLA compile loops for vectors of 512 bits, where it defaults to 256. Has to run before XLA compiles.

    Args:
      variables: the process's environment variables; a width that they ask for stays, and so does the name of a file,
        which XLA reads where XLA_FLAGS does not begin with a flag.
    """
    flags = variables.get("XLA_FLAGS", "")
    if VECTOR_WIDTH not in flags and flags.lstrip()[:1] in ("", "-"):
        variables["XLA_FLAGS"] = f"{flags} {VECTOR_WIDTH}=512".lstrip()
        logging.debug("XLA_FLAGS=%s", variables["XLA_FLAGS"])
