"""Checks that a step applies the run's options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from ..errors import UsageError
from ..internals import graphs
from ..step.options import CLIPS, RATE_OPTIONS, RULE_OPTIONS, Applied

# The calls that together apply an option. An option of none is noted by its own name.
_APPLIED_BY = {
    **dict.fromkeys(CLIPS, ("Update",)),
    "accumulate_steps": ("compute_gradients",),
    "on_nonfinite=skip": ("Update.apply", "Update.end"),
    "precision=float16": ("compute_gradients", "Gradients.unscaled", "Update.apply", "Update.end"),
    **dict.fromkeys(("reduce_dtype", "sync_every_steps"), ("Reduction.sum",)),
    **dict.fromkeys(("freeze", "reduce_lr", "shard_optimizer"), ("Optimizer.apply",)),
    "recompute": ("recomputed",),
}
_UPDATE_OPTIONS = ("clip_norm", "clip_variable_norm", "clip_value", "accumulate_steps", "on_nonfinite", "precision")
_SUM_OPTIONS = ("reduce_dtype", "sync_every_steps")
_ARGUMENTS = {
    "clip_variable_norm": "clipnorm",
    "clip_value": "clipvalue",
    "weight_decay_exclude": None,
    "ema_warmup": None,
}
_MINIMIZE = 'return crankshaft.minimize(self, batch, self.losses, {"loss": self.optimizer})'
_MAKE = "self.optimizer = crankshaft.make_optimizer(self, variables)"


def check_options(applied: Applied, trainer: Any, graph: tf.Graph, has_sharded_optimizer: bool) -> None:
    """Raises UsageError for options that are set and that the step never applies: without it they would do nothing.

    Args:
      trainer: prepared; its step was traced in `graph`.
    """
    # No call of a step applies it: layers have it from the policy under which they were made, as the graph shows.
    precision = trainer.run_context.options.precision
    if precision != "float32" and graphs.has(graph, precision):
        applied.mark("precision")
    sharded = {"shard_optimizer": True} if has_sharded_optimizer else {}
    wanted = {**trainer.run_context.options.changed, **trainer.reduction.changed, **sharded}
    inventory = trainer.inventory
    if not (inventory.all_weights or inventory.trainable_variables):  # then there is no update, as in Keras
        wanted = {name: value for name, value in wanted.items() if name not in _UPDATE_OPTIONS}
    # Keras's optimizers among the attributes are applied by the step itself, so that no update of theirs is noted.
    ids = [*applied.optimizers, *map(id, inventory.keras_optimizers)]
    names = applied.names.union(*(inventory.applied_options.get(optimizer_id, ()) for optimizer_id in ids))
    missing = []
    for name, value in wanted.items():
        calls = _APPLIED_BY.get(name) or _APPLIED_BY.get(f"{name}={value}", (name,))
        if not names.issuperset(calls):
            missing.append(name)
    if not missing:
        return
    has = bool(applied.optimizers), bool(inventory.optimizers)
    causes = {name: _cause(name, wanted[name], *has) for name in missing}
    # One line has one cause and one cure: the first's, with the options that have the same.
    why, fix = causes[missing[0]]
    shown = [*_named_options({name: wanted[name] for name in missing if causes[name] == (why, fix)})]
    have = "has" if len(shown) == 1 else "have"
    owner = type(trainer).__name__
    raise UsageError(f"{' and '.join(shown)} {have} no effect: {owner}{why}; {fix}, or leave the option out")


def _cause(name: str, value: Any, is_updated: bool, has_optimizer: bool) -> tuple[str, str]:
    """Returns why an option is not applied, and the cure; equal for options that go together."""
    if name == "recompute":
        return (
            " calls no layer by crankshaft.engine.layers.recomputed, so nothing would be computed again",
            "call its blocks by that",
        )
    if (name, value) == ("precision", "bfloat16"):
        return " computes nothing in it", "make its layers in build, without a dtype of their own"
    if not is_updated or name in (*_UPDATE_OPTIONS, *_SUM_OPTIONS):
        make = "" if has_optimizer else f", and {_MAKE} in build"
        return (
            ".train_step makes its update without it",
            f"write {_MINIMIZE} in train_step, where losses(batch) returns the metrics{make}",
        )
    if name in RATE_OPTIONS:
        return (
            "'s optimizers have a learning rate of their own",
            "make them with the run's, as in tf.keras.optimizers.Nadam(crankshaft.learning_rate(self))",
        )
    if name in RULE_OPTIONS:
        return "'s optimizers are of its own making", f"write {_MAKE} in build, and no build_optimizer"
    return "'s optimizer was made without it", f"write {_MAKE} in build, or with an optimizer as third argument"


def _named_options(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields options as they were set, named as settings."""
    for name, value in values.items():
        if name in _ARGUMENTS:
            yield f"optimizer_arg={_ARGUMENTS[name] or name}={value}"
        elif isinstance(value, dict):
            yield from (f"{name}={key}={argument}" for key, argument in value.items())
        elif name == "freeze":
            yield from (f"{name}={pattern}" for pattern, _ in value)
        else:
            yield name if value is True else f"{name}={value}"
