"""Learning-rate schedules: Keras schedules found by name, with an optional linear warm-up.

Made on the host, called in replica code with the number of updates applied so far.
"""

import itertools
from collections.abc import Callable

import tensorflow as tf

from ..arguments import COUNT, FROM_ZERO, INT32, POSITIVE, Interval, check_arguments, parameters, unknown
from ..errors import UsageError
from ..step.options import SCHEDULES

_keras = tf.keras.optimizers.schedules
ARGUMENTS = {
    **dict.fromkeys(("alpha", "end_learning_rate", "power", "values"), FROM_ZERO),
    **dict.fromkeys(("decay_rate", "m_mul"), POSITIVE),
    **dict.fromkeys(("decay_steps", "first_decay_steps"), COUNT),
    "t_mul": Interval(lower=1, upper=1000),
    "boundaries": Interval(lower=0, upper=INT32, whole=True),
}


class WarmUp(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise to `schedule(0)` over `warmup_steps`, then `schedule` from its own step 0; it may be a number.

    Step s of the warm-up has `schedule(0) * (s + 1) / (warmup_steps + 1)`: no step is wasted on a rate of zero, and the
    rise meets the schedule exactly at step `warmup_steps`. See Goyal et al., https://arxiv.org/abs/1706.02677, section
    2.2.
    """

    def __init__(self, schedule, warmup_steps):
        self.schedule = schedule
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        # float32 represents whole numbers exactly only up to 2**24, so steps are subtracted as int64.
        step = tf.cast(step, tf.int64)
        fraction = tf.cast(step + 1, tf.float32) / (self.warmup_steps + 1)
        after = tf.maximum(step - self.warmup_steps, 0)
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        return tf.cast(rate, tf.float32) * tf.minimum(fraction, 1.0)


class ByExamples(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that continues by examples in a run that was resumed with another batch size (`Order.rate_step`)."""

    def __init__(self, schedule, order):
        self.schedule = schedule
        self.order = order

    def __call__(self, step):
        return self.schedule(self.order.rate_step(tf.cast(step, tf.int64)))


def build(name, learning_rate, total_steps, warmup_steps=0, **arguments):
    """Makes the schedule called `name`, which begins with a warm-up if `warmup_steps` > 0.

    Args:
      name: constant, cosine, cosine_restarts, exponential, polynomial or piecewise; case does not matter.
      learning_rate: the rate at the end of the warm-up and the start of the schedule.
      total_steps: updates in the whole run, including the warm-up. The schedule decays over the steps after the
        warm-up, and steps in the arguments are counted from there.
      warmup_steps: updates of the warm-up; 0 for none.
      **arguments: those of the schedule:
        cosine: alpha=0.0 (the last rate as a fraction of the first), decay_steps.
        cosine_restarts: first_decay_steps (of the first period), t_mul=2.0 (each period's length relative to the one
          before), m_mul=1.0 (each period's first rate, relative to the one before), alpha=0.0. Loshchilov and Hutter,
          https://arxiv.org/abs/1608.03983.
        exponential: decay_rate=0.1, decay_steps, staircase=False.
        polynomial: end_learning_rate=0.0, power=1.0, decay_steps.
        piecewise: boundaries (steps, each later than the one before), values (rates as they are,
          one more than the boundaries; by default each is a tenth of the one before, beginning
          with learning_rate).

    Returns:
      A Keras LearningRateSchedule: (integer scalar step) -> float32 scalar; a number if the rate is constant.

    Raises:
      UsageError: an unknown name or argument (with the nearest known one), or no step left for the schedule.
    """
    schedule_name = name.lower()
    if schedule_name not in _SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    if warmup_steps < 0:
        raise UsageError(f"warmup_steps={warmup_steps} is negative; use 0 for no warm-up")
    if warmup_steps >= total_steps:
        raise UsageError(
            f"warmup_steps={warmup_steps} leaves no step of total_steps={total_steps} "
            f"for the schedule; use at most {max(total_steps - 1, 0)}"
        )
    make = _SCHEDULES[schedule_name]
    names = parameters(make).keys() - {"learning_rate", "remaining_steps"}
    check_arguments(f"schedule {schedule_name}", arguments, names, ARGUMENTS)
    schedule = make(float(learning_rate), total_steps - warmup_steps, **arguments)
    return WarmUp(schedule, warmup_steps) if warmup_steps else schedule


def named() -> dict[str, Callable]:
    """Returns the functions that make schedules, by name, from (learning_rate, remaining_steps, **arguments)."""
    return dict(_SCHEDULES)


def _constant(learning_rate, remaining_steps):
    return learning_rate


def _cosine(learning_rate, remaining_steps, alpha=0.0, decay_steps=None):
    return _keras.CosineDecay(learning_rate, decay_steps or remaining_steps, alpha=alpha)


def _cosine_restarts(learning_rate, remaining_steps, first_decay_steps=0, t_mul=2.0, m_mul=1.0, alpha=0.0):
    if not first_decay_steps:
        raise UsageError("schedule cosine_restarts needs first_decay_steps; set the steps of its first period")
    return _keras.CosineDecayRestarts(learning_rate, first_decay_steps, t_mul, m_mul, alpha)


def _exponential(learning_rate, remaining_steps, decay_rate=0.1, decay_steps=None, staircase=False):
    return _keras.ExponentialDecay(learning_rate, decay_steps or remaining_steps, decay_rate, staircase=staircase)


def _polynomial(learning_rate, remaining_steps, end_learning_rate=0.0, power=1.0, decay_steps=None):
    return _keras.PolynomialDecay(learning_rate, decay_steps or remaining_steps, end_learning_rate, power=power)


def _piecewise(learning_rate, remaining_steps, boundaries=(), values=None):
    boundaries = list(boundaries)
    if not boundaries:
        raise UsageError("schedule piecewise needs boundaries; set the steps at which the rate changes")
    if not all(before < after for before, after in itertools.pairwise(boundaries)):
        raise UsageError(
            f"schedule piecewise has boundaries {', '.join(map(str, boundaries))}; use steps each later than the one "
            "before"
        )
    if values is None:
        values = [learning_rate * 0.1**i for i in range(len(boundaries) + 1)]
    if len(values) != len(boundaries) + 1:
        raise UsageError(
            f"schedule piecewise has {len(boundaries)} boundaries and {len(values)} values; "
            f"use {len(boundaries) + 1} values"
        )
    return _keras.PiecewiseConstantDecay(boundaries, [float(value) for value in values])


_MAKERS = (_constant, _cosine, _cosine_restarts, _exponential, _polynomial, _piecewise)
_SCHEDULES: dict[str, Callable] = dict(zip(SCHEDULES, _MAKERS, strict=True))
