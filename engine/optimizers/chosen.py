"""The optimizer that a run's options describe, and which of these options another one has the values of. Host code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ..internals import keras
from ..step.options import OF_RATE, OF_RULE, StepOptions
from . import schedules
from .base import Optimizer
from .rules import build

_CLOSE = 1e-6  # relative: rates are float32


def rate_of_options(options: StepOptions) -> tf.keras.optimizers.schedules.LearningRateSchedule:
    """Makes the schedule of a run's learning rate, its warm-up included."""
    name, arguments = options.learning_rate_schedule, options.learning_rate_schedule_arg
    schedule = schedules.build(
        name, options.learning_rate, options.total_steps, warmup_steps=options.warmup_steps, **arguments
    )
    is_constant = options.rate_by is None or isinstance(schedule, schedules.Constant)
    return schedule if is_constant else schedules.ByExamples(schedule, options.rate_by)


def of_options(options: StepOptions) -> Optimizer:
    """Makes the optimizer that a run's options describe, not yet built."""
    decay = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    exclude = {"weight_decay_exclude": options.weight_decay_exclude}
    rate = rate_of_options(options)
    return build(options.optimizer, rate, of_options=True, **exclude, **decay, **options.optimizer_arg)


def options_of(optimizer: Optimizer | tf.keras.optimizers.Optimizer, options: StepOptions) -> set[str]:
    """Returns the names of the options whose values an optimizer has, one of the engine's or Keras's, built.

    Of one that was not made of the options, its values are compared: a program may have read them. A rate that is a
    function of its own, and not a number or a schedule, counts as the run's.
    """
    decay = optimizer.weight_decay or 0.0
    excludes = decay and getattr(optimizer, "weight_decay_exclude", None) == options.weight_decay_exclude
    if getattr(optimizer, "of_options", False):
        return {*OF_RATE, *OF_RULE} - (set() if excludes else {"weight_decay_exclude"})
    theirs = getattr(optimizer, "keras_optimizer", optimizer)
    theirs = getattr(theirs, "inner_optimizer", theirs)
    settings = theirs.get_config() if isinstance(theirs, tf.keras.optimizers.Optimizer) else vars(theirs)
    has = {
        "optimizer": type(theirs).__name__.lower() == options.optimizer.lower(),
        "optimizer_arg": all(settings.get(name) == value for name, value in options.optimizer_arg.items()),
        "weight_decay": decay == options.weight_decay,
        "weight_decay_exclude": bool(excludes),
    }
    changed = [name for name in OF_RATE if name in options.changed]
    rate = optimizer._learning_rate if isinstance(optimizer, Optimizer) else None  # a Keras one's may be its own
    found = _equal_rates(keras.rate_of(theirs) if rate is None else rate, options) if changed else set()
    return found | {name for name, is_equal in has.items() if is_equal}


def _equal_rates(rate: Any, options: StepOptions) -> set[str]:
    if callable(rate) and not isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return set(OF_RATE)
    warm, total, ours = options.warmup_steps, options.total_steps, rate_of_options(options)
    unequal = {
        step
        for step in (0, warm // 2, warm, (warm + total) // 2, total - 1)
        if abs(_at(rate, step) - _at(ours, step)) > _CLOSE * options.learning_rate
    }
    if not unequal:
        return set(OF_RATE)
    return set() if warm in unequal else {"learning_rate"}


def _at(rate: Callable | Any, step: int) -> float:
    return float(rate(tf.constant(step, tf.int64)) if callable(rate) else rate)
