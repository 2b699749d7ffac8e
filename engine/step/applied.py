"""Which of a run's options its steps apply: one that is set and never applied is an error before the first step.

The code that applies an option marks it, while a step is traced; reading an option marks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..internals.errors import UsageError, setting
from .options import OF_RATE, OF_RULE

# An option that is applied in several places, and what marks them; any other is marked by its own name.
_PARTS = {
    "on_nonfinite=skip": ("skipping", "ending"),
    "precision=float16": ("scaling", "unscaling", "skipping", "ending"),
}
_OF_UPDATE = ("clip_norm", "clip_variable_norm", "clip_value", "accumulate_steps", "on_nonfinite", "precision")
_OF_SUM = ("reduce_dtype", "powersgd_rank", "sync_every_steps")
_ARGUMENTS = {
    "clip_variable_norm": "clipnorm",
    "clip_value": "clipvalue",
    "weight_decay_exclude": None,
    "ema_warmup": None,
}

_MINIMIZE = 'return crankshaft.minimize(self, batch, self.losses, {"loss": self.optimizer})'
_MAKE = "self.optimizer = crankshaft.make_optimizer(self, variables)"


class Applied:
    """What the traces of a run's steps have applied so far.

    Traces add up: a `tf.function` that a step calls is traced once, whichever trace of the step came first.

    Attributes:
      names: of options, or of the parts of one that is applied in several places.
      optimizers: the `id`s of the engine's optimizers that made an update.
      averaged: the `id`s of the tf.Variables that a step of the user's has averaged over replicas itself.
    """

    def __init__(self):
        self.names: set[str] = set()
        self.optimizers: set[int] = set()
        self.averaged: set[int] = set()

    def mark(self, *names: str) -> None:
        """Marks options as applied."""
        self.names.update(names)

    def mark_update(self, optimizer: Any) -> None:
        """Marks that one of the engine's optimizers makes an update, and so whatever it does in each."""
        self.optimizers.add(id(optimizer))
        self.mark("freeze", "reduce_lr", "shard_optimizer")
        if optimizer.weight_average is not None:
            self.mark("ema_decay", "ema_warmup")

    def check(self, trainer, has_sharded_optimizer: bool = False) -> None:
        """Raises UsageError, one line, for the options that are set and that nothing has applied.

        Args:
          trainer: whose step was traced, prepared.
          has_sharded_optimizer: whether its mesh shards the optimizer.
        """
        sharded = {"shard_optimizer": True} if has_sharded_optimizer else {}
        wanted = {**trainer.given.options.changed, **trainer.reduction.changed, **sharded}
        names = self.names | trainer.holdings.options_of_optimizers(self.optimizers)
        missing = [name for name, value in wanted.items() if not names.issuperset(_marks(name, value))]
        if not missing:
            return
        holds_optimizer = bool(trainer.holdings.optimizers)
        causes = {name: self._cause(name, wanted[name], holds_optimizer) for name in missing}
        why, cure = causes[missing[0]]
        shown = [*_shown({name: wanted[name] for name in missing if causes[name] == (why, cure)})]
        have = "has" if len(shown) == 1 else "have"
        whose = type(trainer).__name__
        raise UsageError(f"{' and '.join(shown)} {have} no effect: {whose}{why}; {cure}, or leave the option out")

    def _cause(self, name: str, value: Any, holds_optimizer: bool) -> tuple[str, str]:
        """Returns why an option is not applied, and what to write: the same for options that go together."""
        if name == "recompute":
            return (
                " calls no layer by crankshaft.engine.layers.recomputed, so nothing would be computed again",
                "call its blocks by that",
            )
        if (name, value) == ("precision", "bfloat16"):
            return " computes nothing in it", "make its layers in build, without a dtype of their own"
        if not self.optimizers or name in (*_OF_UPDATE, *_OF_SUM):
            make = "" if holds_optimizer else f", and {_MAKE} in build"
            return (
                ".train_step makes its update without it",
                f"write {_MINIMIZE} in train_step, where losses(batch) returns the metrics{make}",
            )
        if name in OF_RATE:
            return (
                "'s optimizers have a learning rate of their own",
                "make them with the run's, as in tf.keras.optimizers.Nadam(crankshaft.learning_rate(self))",
            )
        if name in OF_RULE:
            return "'s optimizers are of its own making", f"write {_MAKE} in build, and no build_optimizer"
        return "'s optimizer was made without it", f"write {_MAKE} in build, or with an optimizer as third argument"


def _marks(name: str, value: Any) -> tuple[str, ...]:
    """Returns all that is marked where an option is applied."""
    return _PARTS.get(f"{name}={value}", (name,))


def _shown(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields options as they were given, with their names, which are flags', in backquotes."""
    for name, value in values.items():
        if name in _ARGUMENTS:
            yield f"{setting('optimizer_arg', _ARGUMENTS[name] or name)}={value}"
        elif isinstance(value, dict):
            yield from (setting(name, f"{each}={given}") for each, given in value.items())
        elif name == "freeze":
            yield from (setting(name, pattern) for pattern, _ in value)
        else:
            yield setting(name, None if value is True else value)
