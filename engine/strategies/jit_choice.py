"""Chooses for `jit=auto` by measuring both ways of running the training loop.

XLA wins on some dense layers and loses on others, by a wide margin, so only a measurement decides.
"""

from __future__ import annotations

import math
import time

import tensorflow as tf

from .. import logging
from ..errors import NotCompilableError, reason
from ..internals import graphs
from ..state import TrainState
from .base import Interrupted
from .inner_loop import InnerLoop

_TIMED_SECONDS = 0.25
_FEW_STEPS = 50  # these take less time than measuring XLA
_UNROLLED_FROM = 20_000  # fewer are over before unrolling saves the time of tracing four more
_SHORT_SECONDS = 5.0  # shorter runs without XLA are not worth a measurement, which takes as long
_MOST_OPERATIONS = 2_000  # operations of a step: with more, XLA compiles longer, and can't be interrupted
_MOST_OFF_CPUS = 16_000  # where launches cost more; 12 blocks of a transformer are 5,000, ten seconds of a CPU
_CLEAR = 2.0  # if one way is this many times as fast, it is not timed again
_WORTH_IT = 1.05  # XLA must be this much faster: it needs one more compilation per batch shape
# Errors for graphs that XLA can't compile; ResourceExhaustedError if they take too much memory.
_NOT_COMPILABLE = (
    NotCompilableError,
    tf.errors.InvalidArgumentError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    NotImplementedError,
)


def is_short(steps: int | None, rate: float = math.inf) -> bool:
    """Returns whether `steps` (None: endless) at a rate per second are too few for measuring XLA to pay off."""
    return steps is not None and (steps <= _FEW_STEPS or steps < _SHORT_SECONDS * rate < math.inf)


def unrolls(steps: int | None) -> bool:
    """Returns whether small steps are to be unrolled in a loop of `steps` (None: endless)."""
    return steps is None or steps >= _UNROLLED_FROM


def measure(
    strategy, state: TrainState, clock=time.perf_counter, steps: int | None = None, ends=lambda: None
) -> tuple[dict[bool, tuple[float, InnerLoop]], str]:
    """Times the training program with and without XLA, and restores every variable.

    Args:
      steps: number of steps that the run has left; None if it has no end.
      ends: returns the reason to end the run now, a text; None without one.

    Returns:
      ({jit: (steps per second, the better of two; program)}, why entry True is missing, if it is): XLA can't compile
      the step, or is known to be slow for it. If XLA has no kernel for one of the step's ops, none is executed, as such
      an op may have effects that can't be undone: a function of Python may play an environment, or read a queue.

    Raises:
      Interrupted: the run ends, by its reason; every variable is restored.
    """
    measured: dict[bool, tuple[float, InnerLoop]] = {}
    why_not = ""
    devices = strategy.describe()["devices"]
    on_cpus = {tf.DeviceSpec.from_string(name).device_type for name in devices} == {"CPU"}

    def made(jit: bool) -> InnerLoop:
        program = strategy.program("train", strategy.training.feed, jit)
        program.unrolls = program.unrolls and unrolls(steps)
        return program

    (plain := made(False)).trace()
    if op := plain.lacked_by_xla:
        try:
            made(True).trace()  # for XLA some ops are replaced
        except NotCompilableError:
            return {}, f"it has no kernel for {op.type}"
    for jit in (False, True):
        # Within a loop XLA has only its slowest kernels for these on CPUs: a step of the reference CNN takes 28 times
        # as long, one of resnet20 88 times as much CPU time (11 s), and a trial would delay a run by minutes.
        if jit and on_cpus and graphs.CONVOLUTIONS & measured[False][1].operations.keys():
            why_not = "not tried with it, since its convolutions are slow on CPUs"
            break
        if jit and is_short(steps, measured[False][0]):
            why_not = f"not tried with it, since {steps:,} steps are over sooner"
            break
        most = _MOST_OPERATIONS if on_cpus else _MOST_OFF_CPUS
        if jit and (operations := measured[False][1].operations.total()) > most:
            why_not = f"not tried with it, since {operations:,} operations take it long to compile; jit=on does"
            break
        program = made(True) if jit else plain
        try:
            with state.restoring():
                measured[jit] = (_steps_per_second(program, clock, ends), program)
        except _NOT_COMPILABLE as error:
            if not jit:
                raise
            out_of_memory = isinstance(error, tf.errors.ResourceExhaustedError)
            why_not = "it has not enough memory for this step" if out_of_memory else "it cannot compile this step"
            logging.info("jit=auto: %s (%s)", why_not, reason(error.__cause__ or error))
    # The first one timed also allocates memory for both, and disturbances only slow a measurement.
    rates = [rate for rate, _ in measured.values()]
    if len(rates) == 2 and max(rates) <= _CLEAR * min(rates):
        for jit, (rate, program) in measured.items():
            with state.restoring():
                measured[jit] = (max(rate, _steps_per_second(program, clock, ends)), program)
    return measured, why_not


def choose(measured: dict[bool, tuple[float, InnerLoop]]) -> bool:
    """Returns whether to use XLA."""
    return True in measured and measured[True][0] > _WORTH_IT * measured[False][0]


def _steps_per_second(program: InnerLoop, clock, ends) -> float:
    """Measures a program's rate from its step on, over about a quarter of a second, without compilation."""
    step = program.step
    if why := ends():
        raise Interrupted(why)
    program(step, 1).sums.read()
    steps, seconds = 1, 0.0
    for _ in range(2):  # one step determines how many fill the time
        before = clock()
        result = program(step, steps)
        result.sums.read()
        seconds = clock() - before
        rate = result.steps / seconds
        steps = max(1, int(rate * _TIMED_SECONDS))
        if seconds > _TIMED_SECONDS / 2:
            break
    return rate
