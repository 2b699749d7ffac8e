"""Chooses for `jit=auto` by measuring both ways of running the training loop. Host code.

XLA wins on some dense layers and loses on others, by far either way, so only a measurement tells.
"""

from __future__ import annotations

import time

import tensorflow as tf
from absl import logging

from ..errors import reason
from ..internals import graphs
from ..state import TrainState
from .inner_loop import InnerLoop

_TIMED_SECONDS = 0.25
_MOST_OPERATIONS = 2_000  # of a step: the more, the longer XLA compiles, and it can't be interrupted
_CLEAR = 2.0  # where one way is so many times as fast, it is not timed again
_WORTH_IT = 1.05  # XLA has to be this much faster: a compilation more, for each shape of batch
# What TensorFlow raises for a graph that XLA cannot take, ResourceExhaustedError for one that takes too much memory so.
_NOT_COMPILABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    NotImplementedError,
)


def measure(strategy, state: TrainState, clock=time.perf_counter) -> tuple[dict[bool, tuple[float, InnerLoop]], str]:
    """Times the training program with and without XLA, and puts every variable back as it was.

    Returns:
      ({jit: (steps per second, the better of two times; program)}, why there is no entry True, if there is none): XLA
      cannot compile the step, or is known to be slow there.
    """
    measured: dict[bool, tuple[float, InnerLoop]] = {}
    why_not = ""
    for jit in (False, True):
        # Within a loop XLA has only its slowest kernels for these on CPUs: a step of the reference CNN takes 28 times
        # as long, one of resnet20 88 times as much of the CPU (11 s), and a trial would keep a run waiting for minutes.
        if jit and _on_cpus(strategy) and graphs.CONVOLUTIONS & measured[False][1].operations.keys():
            why_not = "not tried with it, since its convolutions are slow on CPUs"
            break
        if jit and (operations := measured[False][1].operations.total()) > _MOST_OPERATIONS:
            why_not = f"not tried with it, since {operations:,} operations take it long to compile; jit=on does"
            break
        program = strategy.program("train", strategy.training.feed, jit)
        try:
            with state.kept():
                measured[jit] = (_steps_per_second(program, clock), program)
        except _NOT_COMPILABLE as error:
            if not jit:
                raise
            out_of_memory = isinstance(error, tf.errors.ResourceExhaustedError)
            why_not = "it has not enough memory for this step" if out_of_memory else "it cannot compile this step"
            logging.info("jit=auto: %s (%s)", why_not, reason(error))
    # The first to be timed has paid for memory that both use, and whatever disturbs one only slows it.
    if len(measured) == 2 and not _is_clear(*(rate for rate, _ in measured.values())):
        for jit, (rate, program) in measured.items():
            with state.kept():
                measured[jit] = (max(rate, _steps_per_second(program, clock)), program)
    return measured, why_not


def _is_clear(some: float, other: float) -> bool:
    return max(some, other) > _CLEAR * min(some, other)


def choose(measured: dict[bool, tuple[float, InnerLoop]]) -> bool:
    """Returns whether XLA is to be used."""
    return True in measured and measured[True][0] > _WORTH_IT * measured[False][0]


def _on_cpus(strategy) -> bool:
    return {tf.DeviceSpec.from_string(name).device_type for name in strategy.describe()["devices"]} == {"CPU"}


def _steps_per_second(program: InnerLoop, clock) -> float:
    """Returns the rate of a program from its step on, over about a quarter of a second, without compilation."""
    step = program.step
    program(step, 1).sums.read()
    steps, seconds = 1, 0.0
    for _ in range(2):  # one step says how many fill the time
        before = clock()
        result = program(step, steps)
        result.sums.read()
        seconds = clock() - before
        rate = result.steps / seconds
        steps = max(1, int(rate * _TIMED_SECONDS))
        if seconds > _TIMED_SECONDS / 2:
            break
    return rate
