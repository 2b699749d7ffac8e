"""How many threads of a CPU share the work, which decides the order of sums and so their bits."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import Manifest
from ...engine.machine import cpus
from ...engine.strategies.base import Strategy


def configured() -> int:
    """Counts the threads that TensorFlow takes for an operation by default or by its environment variable."""
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(threads) if threads.isdecimal() else len(cpus.usable_cpus([os.getpid()]))


def counts(strategy: Strategy) -> dict[str, int]:
    """Returns threads per operation and parallel micro-batches; empty if no CPU here computes gradients."""
    if strategy.computing_tasks or "CPU" not in strategy.computes_on[0]:
        return {}
    threads = tf.config.threading.get_intra_op_parallelism_threads() or configured()
    return {"threads": threads, "micro_batches": strategy.parallel_micro_batches}


def warn_of_others(manifest: Manifest, about: dict[str, Any]) -> None:
    """Warns if a run continues with other threads than its checkpoint's, if the checkpoint names them."""
    before, now = manifest.about.get("cpu"), about.get("cpu")
    if before and now and before != now:
        logging.warning(
            "%s was computed with %s, and this process has %s: sums round otherwise, so from here on the bits are not "
            "those of one run; to keep them so, continue where the run may use as many cores",
            *(manifest.name, _describe(before), _describe(now)),
        )


def _describe(cpu: dict[str, int]) -> str:
    return f"{cpu.get('threads')} thread(s) per operation and {cpu.get('micro_batches')} micro-batch(es) in parallel"
