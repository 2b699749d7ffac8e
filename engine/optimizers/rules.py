"""Updates by TensorFlow's fused kernels: sgd, momentum, adam, adamw, adagrad, rmsprop and ftrl.

Each equals Keras's own; any other Keras optimizer is found by name. The rules are replica code. The functions at the
end run on the host: they make the optimizer that a run's options describe, and say which options an optimizer applies.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from ..arguments import (
    DECAY,
    FINITE,
    FROM_ZERO,
    INT32,
    POSITIVE,
    Expression,
    Interval,
    check_arguments,
    parameters,
    unknown,
)
from ..internals import keras_optimizers
from ..step.options import RATE_OPTIONS, RULE_OPTIONS, StepOptions
from . import schedules
from .base import FusedOptimizer, Optimizer, Rate
from .keras_adapter import KerasOptimizer

# For the engine's rules and Keras's, which agree on the names; applied to each number of a tuple or list.
ARGUMENTS: dict[str, Interval | Expression] = {
    **dict.fromkeys(("beta_1", "beta_2", "rho", "momentum", "adam_beta_1", "adam_beta_2"), DECAY),
    **dict.fromkeys(("epsilon", "epsilon_1", "epsilon_2", "clip_threshold", "rms_rate"), POSITIVE),
    **dict.fromkeys(("initial_accumulator_value", "beta", "adam_weight_decay", "adam_lr_ratio"), FROM_ZERO),
    **dict.fromkeys(("clipnorm", "clipvalue"), FROM_ZERO),
    **{f"{kind}_regularization_strength": FROM_ZERO for kind in ("l1", "l2", "l2_shrinkage")},
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), FINITE),
    "learning_rate_power": Interval(lower=-100, upper=0),  # FTRL's
    "beta_2_decay": Interval(lower=-100, below=0),  # Adafactor's: 1 - step ** beta_2_decay is its beta_2
    "ns_steps": Interval(lower=1, upper=1000, whole=True),
    "warmup_steps": Interval(lower=0, upper=INT32, whole=True),
    "weight_decay_exclude": Expression(),
}


class SGD(FusedOptimizer):
    """Plain gradient descent: variable -= learning_rate * gradient."""

    is_elementwise = takes_factors_as_rate = True
    moves_all_rows = False

    def __init__(self, learning_rate: Rate = 0.01, **arguments: Any):
        super().__init__(learning_rate, **arguments)

    def dense(self, var: Tensor, lr: Tensor, grad: Tensor, use_locking: bool) -> None:
        tf.raw_ops.ResourceApplyGradientDescent(var=var, alpha=lr, delta=grad, use_locking=use_locking)

    def sparse(self, var: Tensor, lr: Tensor, grad: Tensor, indices: Tensor, **_: Any) -> None:
        tf.raw_ops.ResourceScatterSub(resource=var, indices=indices, updates=lr * grad)


class Momentum(FusedOptimizer):
    """Gradient descent with momentum, optionally Nesterov's; Keras's SGD(momentum=...).

    The momentum of a table's row that is not in use neither decays nor moves it.
    Sutskever et al., http://proceedings.mlr.press/v28/sutskever13.html.
    """

    is_elementwise = takes_factors_as_rate = True

    def __init__(self, learning_rate: Rate = 0.01, momentum: float = 0.9, nesterov: bool = False, **arguments: Any):
        super().__init__(learning_rate, **arguments)
        self.momentum = momentum
        self.nesterov = nesterov

    def initial_slots(self) -> dict[str, float]:
        return {"accum": 0.0}

    def scalars(self, learning_rate: Tensor, step: Tensor) -> dict[str, Any]:
        return {"lr": learning_rate, "momentum": self.momentum}

    def dense(self, **arguments: Any) -> None:
        tf.raw_ops.ResourceApplyKerasMomentum(use_nesterov=self.nesterov, **arguments)

    def sparse(self, **arguments: Any) -> None:
        tf.raw_ops.ResourceSparseApplyKerasMomentum(use_nesterov=self.nesterov, **arguments)


def outer(learning_rate: float = 0.7, momentum: float = 0.9) -> Momentum:
    """Makes the outer optimizer of local SGD, by default DiLoCo's (https://arxiv.org/abs/2311.08105, section 2)."""
    return Momentum(learning_rate, momentum, nesterov=True, name="outer")


class Adam(FusedOptimizer):
    """Adam (Kingma & Ba, https://arxiv.org/abs/1412.6980), epsilon outside the bias correction.

    Of the engine's tables it is *lazy*: only rows in use are updated, and the moments of the others do not decay. The
    bias correction counts all updates, not the row's own.
    """

    is_elementwise = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **arguments: Any,
    ):
        super().__init__(learning_rate, **arguments)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def initial_slots(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0}

    def scalars(self, learning_rate: Tensor, step: Tensor) -> dict[str, Any]:
        # In float32, 1 - 0.999 would make each step 7e-6 too long. The dense kernel averages by betas that are rounded
        # to float32, so its rate is corrected for these; a sparse update is computed here, by the betas themselves.
        rate = tf.cast(learning_rate, tf.float64)
        m, v = (_in_kernel(beta) for beta in (self.beta_1, self.beta_2))
        return {
            "lr": rate * tf.sqrt(_weight(v, step)) / _weight(m, step),
            "sparse_lr": rate * tf.sqrt(_weight(self.beta_2, step)) / _weight(self.beta_1, step),
            "beta1": self.beta_1,
            "beta2": self.beta_2,
            "epsilon": self.epsilon,
        }

    def dense(self, sparse_lr: Tensor, **arguments: Any) -> None:
        # The kernel would correct the rate by powers in float32, in which 1 - 0.999 keeps four digits.
        tf.raw_ops.ResourceApplyAdam(beta1_power=0.0, beta2_power=0.0, **arguments)

    def sparse(
        self, var: Tensor, m: Tensor, v: Tensor, sparse_lr: Tensor, grad: Tensor, indices: Tensor, **_: Any
    ) -> None:
        m_rows = _gather(m, indices)
        v_rows = _gather(v, indices)
        m_rows += (grad - m_rows) * (1.0 - self.beta_1)
        v_rows += (tf.square(grad) - v_rows) * (1.0 - self.beta_2)
        _scatter(m, indices, m_rows)
        _scatter(v, indices, v_rows)
        change = m_rows * sparse_lr / (tf.sqrt(v_rows) + self.epsilon)
        tf.raw_ops.ResourceScatterSub(resource=var, indices=indices, updates=change)


class AdamW(Adam):
    """Adam with decoupled weight decay by default; https://arxiv.org/abs/1711.05101."""

    def __init__(self, learning_rate: Rate = 0.001, weight_decay: float = 0.004, **arguments: Any):
        super().__init__(learning_rate, weight_decay=weight_decay, **arguments)


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi et al., https://jmlr.org/papers/v12/duchi11a.html).

    Keras divides by sqrt(accumulator + epsilon) and the kernel by sqrt(accum), so the slot starts
    at initial_accumulator_value + epsilon. Sparse updates equal dense ones.
    """

    is_elementwise, moves_all_rows = True, False
    dense = staticmethod(tf.raw_ops.ResourceApplyAdagrad)
    sparse = staticmethod(tf.raw_ops.ResourceSparseApplyAdagrad)

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **arguments: Any,
    ):
        super().__init__(learning_rate, **arguments)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def initial_slots(self) -> dict[str, float]:
        return {"accum": self.initial_accumulator_value + self.epsilon}


class RMSprop(FusedOptimizer):
    """RMSprop (Tieleman & Hinton, Coursera 2012, lecture 6e), optionally with momentum and centering.

    The averages and the momentum of a table's rows that are not in use do not decay. The sparse kernels exist only for
    CPUs, so these updates are gathered and scattered.
    """

    is_elementwise = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **arguments: Any,
    ):
        super().__init__(learning_rate, **arguments)
        self.rho = rho
        self.momentum = momentum
        self.epsilon = epsilon
        self.centered = centered

    def initial_slots(self) -> dict[str, float]:
        return {"ms": 0.0, "mom": 0.0} | ({"mg": 0.0} if self.centered else {})

    def scalars(self, learning_rate: Tensor, step: Tensor) -> dict[str, Any]:
        # The rate and epsilon compensate for the error of the kernel's averages.
        ratio = _weight(_in_kernel(self.rho), step) / _weight(self.rho, step)
        return {
            "lr": tf.cast(learning_rate, tf.float64) * tf.sqrt(ratio),
            "sparse_lr": learning_rate,
            "rho": self.rho,
            "momentum": self.momentum,
            "epsilon": self.epsilon * ratio,
        }

    def dense(self, sparse_lr: Tensor, **arguments: Any) -> None:
        if self.centered:
            tf.raw_ops.ResourceApplyCenteredRMSProp(**arguments)
        else:
            tf.raw_ops.ResourceApplyRMSProp(**arguments)

    def sparse(
        self, var: Tensor, ms: Tensor, mom: Tensor, sparse_lr: Tensor, grad: Tensor, indices: Tensor, **others: Tensor
    ) -> None:
        ms_rows = _gather(ms, indices)
        ms_rows += (tf.square(grad) - ms_rows) * (1.0 - self.rho)
        _scatter(ms, indices, ms_rows)
        variance = ms_rows + self.epsilon
        if self.centered:
            mg_rows = _gather(others["mg"], indices)
            mg_rows += (grad - mg_rows) * (1.0 - self.rho)
            _scatter(others["mg"], indices, mg_rows)
            variance -= tf.square(mg_rows)
        change = sparse_lr * grad * tf.math.rsqrt(variance)
        change += self.momentum * _gather(mom, indices)
        _scatter(mom, indices, change)
        tf.raw_ops.ResourceScatterSub(resource=var, indices=indices, updates=change)


class Ftrl(FusedOptimizer):
    """FTRL-Proximal (McMahan et al., https://research.google/pubs/pub41159/) with L2 shrinkage.

    The rule recomputes a variable from its slots, so a dense update sets a weight whose gradient was always zero to
    zero; a sparse update, of any variable, leaves such a row unchanged. It divides by the learning rate: a schedule
    must not reach zero.
    """

    is_elementwise, moves_all_rows = True, False
    dense = staticmethod(tf.raw_ops.ResourceApplyFtrlV2)
    sparse = staticmethod(tf.raw_ops.ResourceSparseApplyFtrlV2)

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **arguments: Any,
    ):
        super().__init__(learning_rate, **arguments)
        self.learning_rate_power = learning_rate_power
        self.initial_accumulator_value = initial_accumulator_value
        self.l1_regularization_strength = l1_regularization_strength
        self.l2_regularization_strength = l2_regularization_strength
        self.l2_shrinkage_regularization_strength = l2_shrinkage_regularization_strength
        self.beta = beta

    def initial_slots(self) -> dict[str, float]:
        return {"accum": self.initial_accumulator_value, "linear": 0.0}

    def scalars(self, learning_rate: Tensor, step: Tensor) -> dict[str, Any]:
        return {
            "lr": learning_rate,
            "l1": self.l1_regularization_strength,
            "l2": self.l2_regularization_strength + self.beta / (2.0 * learning_rate),
            "l2_shrinkage": self.l2_shrinkage_regularization_strength,
            "lr_power": self.learning_rate_power,
        }


def build(name: str, learning_rate: Rate, **arguments: Any) -> Optimizer:
    """Makes the optimizer called `name`, not yet built.

    Args:
      name: one of NAMES, or any class in tf.keras.optimizers, whose case does not matter; or package.module:Name.
      learning_rate: a number or a schedule.
      **arguments: hyperparameters, with Keras's names, and `Optimizer`'s.

    Raises:
      ValueError: an unknown name or argument, with the nearest known one.
    """
    classes = {name: pkgutil.resolve_name(name)} if ":" in name else named()
    lower = name if ":" in name else name.lower()
    if lower not in classes:
        raise unknown("optimizer", name, classes)
    rule = classes[lower]
    common = parameters(Optimizer).keys()
    names = parameters(rule).keys() | common
    check_arguments(f"optimizer {lower}", arguments, names - {"learning_rate"}, {} if ":" in name else ARGUMENTS)
    if issubclass(rule, Optimizer):
        return rule(learning_rate, **arguments)
    ours = {key: value for key, value in arguments.items() if key in common}
    theirs = {key: value for key, value in arguments.items() if key not in common}
    ours.setdefault("name", lower.rpartition(":")[-1].lower())
    return KerasOptimizer(lambda: rule(**theirs), learning_rate, **ours)


def named() -> dict[str, type]:
    """Returns the optimizers that `build` makes, by name: the rules of this module, and Keras's classes."""
    base = tf.keras.optimizers.Optimizer
    # Wrappers around another optimizer; the engine scales losses itself.
    wrappers = {"optimizer", "lossscaleoptimizer", "multioptimizer"}
    classes = vars(tf.keras.optimizers).values()
    by_name = {c.__name__.lower(): c for c in classes if isinstance(c, type) and issubclass(c, base)}
    return {**{name: c for name, c in by_name.items() if name not in wrappers}, **_RULES}


def _weight(beta: float, step: Tensor) -> Tensor:
    """Returns the sum of the weights of a moving average that began at 0, after `step` updates: float64 scalar."""
    return 1.0 - tf.pow(tf.constant(beta, tf.float64), step)


def _in_kernel(beta: float) -> float:
    """Returns the beta with which a kernel averages, in float32: 1 - 0.999 is smaller there by a relative 1.3e-5.

    Divided by its own weights, that average differs from the intended one only in its time constant.
    """
    return float(np.float32(beta))


def _gather(slot: Tensor, indices: Tensor) -> Tensor:
    return tf.raw_ops.ResourceGather(resource=slot, indices=indices, dtype=tf.float32)


def _scatter(slot: Tensor, indices: Tensor, rows: Tensor) -> None:
    tf.raw_ops.ResourceScatterUpdate(resource=slot, indices=indices, updates=rows)


_RULES = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "ftrl": Ftrl,
}
NAMES = tuple(_RULES)


_CLOSE = 1e-6  # relative: rates are float32


def schedule_from_options(options: StepOptions) -> float | tf.keras.optimizers.schedules.LearningRateSchedule:
    """Makes the schedule of a run's learning rate, including its warm-up; a number if it is constant."""
    name, arguments = options.learning_rate_schedule, options.learning_rate_schedule_arg
    schedule = schedules.build(
        name, options.learning_rate, options.total_steps, warmup_steps=options.warmup_steps, **arguments
    )
    is_constant = options.rate_by is None or not callable(schedule)
    return schedule if is_constant else schedules.ByExamples(schedule, options.rate_by)


def make_from_options(options: StepOptions) -> Optimizer:
    """Makes the optimizer that a run's options describe, not yet built."""
    decay = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    own = {"weight_decay_exclude": options.weight_decay_exclude, "from_options": True, **decay}
    return build(options.optimizer, schedule_from_options(options), **own, **options.optimizer_arg)


def applied_options(optimizer: Optimizer | tf.keras.optimizers.Optimizer, options: StepOptions) -> set[str]:
    """Returns the names of the options that a built optimizer, the engine's or Keras's, applies.

    If it was not made from the options, values are compared: a program may have read them. A rate that is a function,
    not a number or a schedule, counts as the run's.
    """
    decay = optimizer.weight_decay or 0.0
    excludes = decay and getattr(optimizer, "weight_decay_exclude", None) == options.weight_decay_exclude
    if getattr(optimizer, "from_options", False):
        return {*RATE_OPTIONS, *RULE_OPTIONS} - (set() if excludes else {"weight_decay_exclude"})
    theirs = getattr(optimizer, "keras_optimizer", optimizer)
    theirs = getattr(theirs, "inner_optimizer", theirs)
    has = {
        "optimizer": type(theirs).__name__.lower() == options.optimizer.lower(),
        "optimizer_arg": all(vars(theirs).get(name) == value for name, value in options.optimizer_arg.items()),
        "weight_decay": decay == options.weight_decay,
        "weight_decay_exclude": bool(excludes),
    }
    rate = optimizer._learning_rate if isinstance(optimizer, Optimizer) else None  # a Keras optimizer may have its own
    rate = keras_optimizers.schedule_or_rate(theirs) if rate is None else rate
    equal = _equal_rates(rate, options) if {*RATE_OPTIONS} & {*options.changed} else set()
    return equal | {name for name, is_equal in has.items() if is_equal}


def _equal_rates(rate: Any, options: StepOptions) -> set[str]:
    if callable(rate) and not isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return set(RATE_OPTIONS)
    warm, total, ours = options.warmup_steps, options.total_steps, schedule_from_options(options)

    def is_equal(step: int) -> bool:
        at = tf.constant(step, tf.int64)
        theirs, mine = (float(each(at) if callable(each) else each) for each in (rate, ours))
        return abs(theirs - mine) <= _CLOSE * options.learning_rate

    if all(map(is_equal, (0, warm // 2, warm, (warm + total) // 2, total - 1))):
        return set(RATE_OPTIONS)
    return {"learning_rate"} if is_equal(warm) else set()
