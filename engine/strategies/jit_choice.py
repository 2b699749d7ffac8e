"""`jit=auto`: both ways of running the training loop, measured. XLA wins on dense layers and loses on convolutions
on CPUs, by far either way, so only a measurement tells. Host code."""

from __future__ import annotations

import time

import tensorflow as tf
from absl import logging

from engine.state import TrainState

_TIMED_SECONDS = 0.25
_WORTH_IT = 1.05  # XLA has to be this much faster: a compilation more, for each shape of batch
# What TensorFlow raises for a graph that XLA cannot take.
_NOT_COMPILABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    NotImplementedError,
)


def measure(strategy, state: TrainState, clock=time.perf_counter) -> dict[bool, tuple[float, object]]:
    """Times a training loop with and without XLA, and puts every variable back as it was.

    Returns:
      {jit: (steps per second, loop)}; without the entry True if XLA cannot compile the step.
    """
    measured = {}
    for jit in (False, True):
        loop = strategy.train_loop(jit)
        try:
            with state.kept():
                measured[jit] = (_steps_per_second(loop, state.step, clock), loop)
        except _NOT_COMPILABLE as error:
            if not jit:
                raise
            logging.info("jit=auto: XLA cannot compile this step (%s)", str(error).strip().split("\n")[0])
    return measured


def choose(measured: dict[bool, tuple[float, object]]) -> bool:
    """Whether XLA is to be used."""
    return True in measured and measured[True][0] > _WORTH_IT * measured[False][0]


def _steps_per_second(loop, step: int, clock) -> float:
    """The rate of the loop from `step` on, over about a quarter of a second, compilation apart."""
    loop(step, 1).sums.read()
    steps, seconds = 1, 0.0
    for _ in range(2):  # one step says how many fill the time
        before = clock()
        result = loop(step, steps)
        result.sums.read()
        seconds = clock() - before
        rate = result.steps / seconds
        steps = max(1, int(rate * _TIMED_SECONDS))
        if seconds > _TIMED_SECONDS / 2:
            break
    return rate
