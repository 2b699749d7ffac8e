"""Checks what TensorFlow and XLA make of a step."""

from __future__ import annotations

import tensorflow as tf

from .. import logging
from ..errors import NotCompilableError
from ..internals import graphs

# Ops whose CPU kernels accumulate 16-bit values in 16 bits.
_SUMS = {
    *"Cumsum DepthwiseConv2dNativeBackpropFilter ScatterNd TensorScatterAdd".split(),
    *"SegmentMean SegmentSum SegmentSumV2 UnsortedSegmentSum".split(),
}
_STATEFUL_SAMPLING = (
    "the step samples random numbers that differ in a resumed run, also with a seed (%s); sample by "
    "tf.random.stateless_* with step_context().seed(), or by Keras's layers"
)
_STATE_OF_PYTHON = (
    "the step calls Python (%s), and what its functions keep is in no checkpoint: this resumed run goes on with the "
    "weights of the one before, and with the program's new objects, such as an environment; keep their state in "
    "tf.Variables of the trainer"
)
_SUMMARY_OF_ONE = (
    "tf.summary in a step writes what one of %d replicas computes, of its own examples; for the whole batch, return a "
    "metric, such as crankshaft.mean of a value for each example, which a run writes with its own"
)
_SUMS_IN_16_BITS = "on CPUs these accumulate 16-bit values in 16 bits, which loses digits: %s; cast to float32 before"


def check_compilable(graph: tf.Graph) -> None:
    """Raises NotCompilableError for an op that XLA lacks, before XLA prints pages."""
    if op := graphs.lacked_by_xla(graph):
        where = f", at {line}" if (line := graphs.program_line(op)) else ""
        fix = "give the loop maximum_iterations, or use" if op.type == "EmptyTensorList" else "use"
        raise NotCompilableError(f"XLA can't compile {op.type}{where}; {fix} jit=auto or off")


def warn_of_step(graph: tf.Graph, replicas: int, is_resumed: bool) -> None:
    """Warns of what a step that was traced in a graph does not do as it may seem to.

    It samples numbers that no resumed run repeats, calls Python's objects, which are new in a resumed run, adds up
    16-bit values in 16 bits, or writes one replica's summary.
    """
    halves, ops = (tf.bfloat16, tf.float16), [*graphs.operations(graph)]
    if is_resumed and (calls := [op for op in ops if op.type in ("PyFunc", "EagerPyFunc")]):
        logging.warning_once(_STATE_OF_PYTHON, graphs.program_line(calls[0]) or calls[0].name)
    if sampled := {op.type for op in ops if graphs.samples(op)}:
        logging.warning_once(_STATEFUL_SAMPLING, ", ".join(sorted(sampled)))
    if inexact := [op.name for op in ops if op.type in _SUMS and op.outputs[0].dtype in halves]:
        logging.warning_once(_SUMS_IN_16_BITS, ", ".join(inexact[:5]))
    if replicas > 1 and any(op.type.startswith("Write") and op.type.endswith("Summary") for op in ops):
        logging.warning_once(_SUMMARY_OF_ONE, replicas)
