"""The settings of a step, and what a run gives its trainer: plain values, checked when they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

PRECISIONS = ("float32", "bfloat16", "float16")
ON_NONFINITE = ("raise", "skip")
CLIPS = ("clip_norm", "clip_variable_norm", "clip_value")  # one of them


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The settings of `Trainer`'s step.

    Attributes:
      seed: the run's only source of randomness, from 0 to 2^31 - 1.
      precision: what layers compute in; variables stay float32. float16 brings dynamic loss scaling.
      optimizer: a name for `engine.optimizers.build`.
      optimizer_args: its arguments, by name.
      learning_rate: see `engine.optimizers.schedules.build`, as for the next four.
      schedule: the name of the rate's schedule.
      schedule_args: its arguments, by name.
      warmup_steps: in which the rate rises linearly to where it begins.
      total_steps: at which a schedule ends.
      weight_decay: decoupled decay a step, times the learning rate; None takes the optimizer's own default.
      weight_decay_exclude: regular expression; variables whose path it finds are not decayed.
      clip_norm: the gradients' global norm is clipped to it; 0 is off.
      clip_variable_norm: the norm of each variable's gradient is clipped to it; 0 is off.
      clip_value: each value of the gradients is clipped to [-clip_value, clip_value]; 0 is off.
      ema_decay: decay of the weights' moving average used in evaluation; 0 is off. Embedding tables stay out of it.
      accumulate_steps: micro-batches that one update is made of.
      batch_parts: parts of a replica's (micro-)batch that are computed side by side, a thread each.
      recompute: blocks that a model calls by `engine.layers.recomputed` are computed again in the backward pass.
      on_nonfinite: "raise" stops the run after a step that was not finite, "skip" leaves its update out.
      debug: check shapes and labels in the step.
      check_numerics: check every op's output (slow) and name the first that is not finite.

    Raises:
      ValueError: an option is out of range, or two of them clip the same gradients.

    Example:
      >>> StepOptions(optimizer="adamw", learning_rate=0.01, clip_norm=1.0).needs_norm
      True
    """

    seed: int = 0
    precision: str = "float32"
    optimizer: str = "adam"
    optimizer_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = 1e-3
    schedule: str = "constant"
    schedule_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    warmup_steps: int = 0
    total_steps: int = 1
    weight_decay: float | None = None
    weight_decay_exclude: str | None = None
    clip_norm: float = 0.0
    clip_variable_norm: float = 0.0
    clip_value: float = 0.0
    ema_decay: float = 0.0
    accumulate_steps: int = 1
    batch_parts: int = 1
    recompute: bool = False
    on_nonfinite: str = "raise"
    debug: bool = False
    check_numerics: bool = False

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite is left out: float16's overflow now and then."""
        return self.precision == "float16" or self.on_nonfinite == "skip"

    @property
    def needs_norm(self) -> bool:
        """Whether every step needs the gradients' global norm; else it is computed where somebody looks at it."""
        return self.may_skip or self.clip_norm > 0

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision} is unknown; use one of {', '.join(PRECISIONS)}")
        if self.on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite={self.on_nonfinite} is unknown; use one of {', '.join(ON_NONFINITE)}")
        clips = [f"{name}={getattr(self, name)}" for name in CLIPS if getattr(self, name)]
        if len(clips) > 1:
            raise ValueError(f"{' and '.join(clips)} clip the same gradients; use one of them")
        if self.accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={self.accumulate_steps} is not a count; use 1 or more")
        if self.batch_parts < 1:
            raise ValueError(f"batch_parts={self.batch_parts} is not a count; use 1 or more")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay} is not a decay; use 0 (off) up to, not including, 1")


@dataclasses.dataclass(frozen=True)
class Given:
    """What a run gives its trainer, before the model is built.

    Attributes:
      options: what it asks of a step.
      num_classes: of the input's labels, or None.
      vocabulary: how many ids each feature that is one has, by the feature's name; None if no feature is.
      num_servers: that variables live on, when the run began; tables are cut into as many shards.
      example: a batch of one example, zeros: shapes and dtypes, in the form of the data (`engine.step.batches`).
    """

    options: StepOptions = StepOptions()
    num_classes: int | None = None
    vocabulary: dict[str, int] | None = None
    num_servers: int = 1
    example: Any = None
