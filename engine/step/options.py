"""The options of a step, and which of them a run's steps apply: an option that is set and never applied is an error.

The few functions that apply options note that a step calls them while it is traced; reading an option notes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

    from ..data.order import Order

PRECISIONS = ("float32", "bfloat16", "float16")  # in which layers compute, and in which gradients are sent
SCHEDULES = ("constant", "cosine", "cosine_restarts", "exponential", "polynomial", "piecewise")
ON_NONFINITE = ("raise", "skip")
CLIPS = ("clip_norm", "clip_variable_norm", "clip_value")  # at most one of them
RATE_OPTIONS = ("learning_rate", "learning_rate_schedule", "learning_rate_schedule_arg", "warmup_steps")
RULE_OPTIONS = ("optimizer", "optimizer_arg", "weight_decay", "weight_decay_exclude")
# What weight decay leaves out by default: gains of normalizations, and biases.
WEIGHT_DECAY_EXCLUDE = "bias|gamma|beta|(gain|scale)$"
# Applied or chosen by the engine, not by a step's code.
_CHOSEN_BY_ENGINE = ("seed", "total_steps", "rate_by", "parallel_micro_batches", "debug", "check_numerics")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The settings of `Trainer`'s step.

    Attributes:
      seed: the run's only source of randomness, from 0 to 2^31 - 1.
      precision: the precision in which layers compute; variables stay float32. float16 brings dynamic loss scaling.
      optimizer: a name for `engine.optimizers.build`.
      optimizer_arg: the optimizer's arguments, by name.
      learning_rate: see `engine.optimizers.schedules.build`, also for the next four.
      learning_rate_schedule: the schedule's name.
      learning_rate_schedule_arg: the schedule's arguments, by name.
      warmup_steps: number of steps in which the rate rises linearly to its first value.
      total_steps: the step at which a schedule ends, in its own steps.
      rate_by: the order of examples by which a schedule continues in a run that was resumed with another batch size;
        None if its steps are the run's.
      weight_decay: decoupled decay per step, times the learning rate; None is the optimizer's default.
      weight_decay_exclude: regular expression; variables whose path it matches are not decayed.
      clip_norm: the gradients' global norm is clipped to it; 0 is off.
      clip_variable_norm: the norm of each variable's gradient is clipped to it; 0 is off.
      clip_value: each value of the gradients is clipped to [-clip_value, clip_value]; 0 is off.
      freeze: (regular expression, step) pairs: variables whose path it matches are not updated before that step, with
        None never; see `engine.inventory`.
      ema_decay: decay of the weights' moving average used in evaluation; 0 is off. Embedding tables are excluded.
      ema_warmup: whether the decay after n updates is min(ema_decay, (1 + n) / (10 + n)), which short runs need.
      accumulate_steps: number of micro-batches per update (gradient accumulation).
      parallel_micro_batches: how many micro-batches of a replica's (micro-)batch run in parallel, a thread each.
      reduce_lr: whether a hook may lower the learning rates, which the step's optimizers have to follow.
      recompute: whether blocks that a model calls by `engine.layers.recomputed` are computed again in the backward pass
        (activation checkpointing).
      on_nonfinite: "raise" stops the run after a step that was not finite, "skip" skips its update.
      debug: whether to check shapes and labels in the step.
      check_numerics: whether to check every op's output (slow) and name the first that is not finite.

    Raises:
      UsageError: an option is out of range, or two of them clip the same gradients.

    Example:
      >>> StepOptions(optimizer="adamw", learning_rate=0.01, precision="float16").may_skip
      True
    """

    seed: int = 0
    precision: str = "float32"
    optimizer: str = "adam"
    optimizer_arg: dict[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = 1e-3
    learning_rate_schedule: str = "constant"
    learning_rate_schedule_arg: dict[str, Any] = dataclasses.field(default_factory=dict)
    warmup_steps: int = 0
    total_steps: int = 1
    rate_by: Order | None = None
    weight_decay: float | None = None
    weight_decay_exclude: str | None = None
    clip_norm: float = 0.0
    clip_variable_norm: float = 0.0
    clip_value: float = 0.0
    freeze: tuple[tuple[str, int | None], ...] = ()
    ema_decay: float = 0.0
    ema_warmup: bool = True
    reduce_lr: bool = False
    accumulate_steps: int = 1
    parallel_micro_batches: int = 1
    recompute: bool = False
    on_nonfinite: str = "raise"
    debug: bool = False
    check_numerics: bool = False

    @property
    def changed(self) -> dict[str, Any]:
        """The options that a step has to apply, by name: those that differ from their defaults."""
        chosen = {name: getattr(self, name) for name in _CHOSEN_BY_ENGINE}
        if self.weight_decay_exclude == WEIGHT_DECAY_EXCLUDE:
            chosen["weight_decay_exclude"] = WEIGHT_DECAY_EXCLUDE
        defaults = {**vars(_DEFAULTS), **chosen}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a replica's batch."""
        return self.accumulate_steps * self.parallel_micro_batches

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite is skipped: float16's overflow now and then."""
        return self.precision == "float16" or self.on_nonfinite == "skip"

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision={self.precision} is unknown; use one of {', '.join(PRECISIONS)}")
        if self.on_nonfinite not in ON_NONFINITE:
            raise UsageError(f"on_nonfinite={self.on_nonfinite} is unknown; use one of {', '.join(ON_NONFINITE)}")
        clips = [f"{name}={getattr(self, name)}" for name in CLIPS if getattr(self, name)]
        if len(clips) > 1:
            raise UsageError(f"{' and '.join(clips)} clip the same gradients; use one of them")
        for name in ("accumulate_steps", "parallel_micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is not a count; use 1 or more")
        if not 0 <= self.ema_decay < 1:
            raise UsageError(f"ema_decay={self.ema_decay} is not a decay; use 0 (off) up to, not including, 1")
        if not self.ema_warmup and not self.ema_decay:
            raise UsageError("ema_warmup=False needs ema_decay, which is off; set that too, or leave ema_warmup out")


_DEFAULTS = StepOptions()


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The values that a run passes to its trainer before the model is built.

    Attributes:
      num_classes: the number of classes of the input's labels, or None.
      vocabulary: the number of ids of each id feature, by the feature's name; None if there are none.
      num_servers: the number of servers that variables are placed on; tables have as many shards.
      example: a batch of one example of zeros, with the data's form, shapes and dtypes (`engine.step.batches`);
        (features, None) for a saved run that only predicts.
      in_place: whether to train an existing model itself instead of a copy.
      updates_before: updates of an existing model before the run, scalar int64; its steps sample as if they were
        numbered from there. None is 0.
      load_initial: loads the weights with which the run begins, if they fit, into a model that has just been made:
        `load_initial(path, model)`, the path being that of the trainer's attribute.
      reports_loss: whether its step has to return a loss.
      saved_places: the places of variables that checkpoints have, for messages.
      replica_batch_size: the number of examples of a step on each replica.
      evaluation: `example` and `replica_batch_size` of the evaluation data; None if there is none.
      has_unequal_shares: whether some batch's examples do not divide by the replicas.
      rounds_class_weights: whether earlier versions rounded the run's `Data.class_weight`.
    """

    options: StepOptions = StepOptions()
    num_classes: Any = None
    vocabulary: dict[str, int] | None = None
    num_servers: int = 1
    example: Any = None
    in_place: bool = False
    updates_before: tf.Variable | None = None
    load_initial: Callable[[str, Any], None] = lambda path, model: None
    reports_loss: bool = True
    saved_places: str = "an attribute of the trainer (also in a list, a dictionary or a tf.Module)"
    replica_batch_size: int = 1
    evaluation: tuple[Any, int] | None = None
    has_unequal_shares: bool = False
    rounds_class_weights: bool = False

    @property
    def only_predicts(self) -> bool:
        """Whether the run is a saved one, of whose data the features alone are known."""
        return isinstance(self.example, tuple) and len(self.example) == 2 and self.example[1] is None

    @property
    def builds_passed(self) -> bool:
        """Whether an existing model is trained itself: it is built as by Keras, from the program's random numbers."""
        return self.in_place and self.updates_before is not None

    @property
    def host_seed(self) -> int:
        """The seed of random numbers that are sampled on the host."""
        from ..randomness import seed_after  # with TensorFlow, which mistakes do not wait for

        before = self.updates_before
        return self.options.seed if before is None else seed_after(self.options.seed, int(before.numpy()))


class Applied:
    """The options that the traces of a run's steps have applied so far.

    Traces add up: a `tf.function` that a step calls is traced once, in the step's first trace.

    Attributes:
      names: the names of the calls that apply options, and of options that are applied otherwise.
      optimizers: the `id`s of the engine's optimizers that made an update.
    """

    def __init__(self):
        self.names: set[str] = set()
        self.optimizers: set[int] = set()

    def mark(self, *names: str) -> None:
        """Notes calls of a step, or options that it has applied."""
        self.names.update(names)
