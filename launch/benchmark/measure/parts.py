"""A step's parts, each alone: the strategy is bound to a loop that does that part and nothing else. Host code.

So a part is timed as the whole is, by the strategy's own calls: paced, awaited, and agreed where there are several
processes. Within `TrainState.kept` a part leaves no trace in the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ....engine.holdings import Holdings
from ....engine.internals.tensorflow import computed_whole
from ....engine.metrics.means import Mean
from ....engine.runner import StepRunner
from ....engine.state import TrainState
from ....engine.step.batches import with_stand_in
from ....engine.strategies.inner_loop import InnerLoop
from ....engine.trainer import Trainer
from . import rounds
from .length import Length

_TURNS = 3
_GRADIENT_SIZE = 1e-3


class Part(NamedTuple):
    """A feed and a loop over it, to which a strategy is bound to do one part of a step and nothing else."""

    feed: Any
    loop: InnerLoop

    def bind(self, strategy, state: TrainState) -> None:
        """Binds the strategy to the part."""
        strategy.bind(state, self.feed)
        strategy.use_loop(self.loop)


def whole(strategy, state: TrainState, feed, jit: bool) -> Part:
    """Makes all of a step: what users get."""
    strategy.bind(state, feed)
    return Part(feed, strategy.train_loop(jit))


def step(strategy, state: TrainState, feed, jit: bool) -> Part:
    """Makes whole steps on one batch of `feed`, again and again: no input."""
    strategy.bind(state, feed)
    return whole(strategy, state, strategy.repeated_batch(), jit)


def own_step(strategy, state: TrainState, feed, jit: bool) -> Part:
    """Makes whole steps on one batch, as `step`, without what cut layers sum over the mesh's axis `model`."""
    strategy.bind(state, feed)
    runner = StepRunner(Holdings(state.trainer), strategy.mesh)

    def train_step(batch, step, observed):
        with strategy.mesh.without_model_sums():
            return runner.train_step(batch, step, observed)[0]

    return made(strategy, state, strategy.repeated_batch(), train_step)


def input(strategy, state: TrainState, feed, jit: bool) -> Part:
    """Makes batches of `feed`, gathered on each replica and used for nothing: no step."""
    jit = jit and feed.compilable

    def read(batch, *_):
        return used(tf.nest.flatten(with_stand_in(batch)[0]), jit)

    return made(strategy, state, feed, read, jit)


def update(strategy, state: TrainState, feed, jit: bool) -> Part:
    """Makes the optimizers' updates of all dense variables, by gradients that exist already.

    Where parameter servers make them, sending the gradients is included.
    """
    trainer = state.trainer
    variables, optimizers = dense_variables(trainer), Holdings(trainer).optimizers

    def apply(gradients, *_):
        given = dict(zip(map(id, variables), gradients, strict=True))
        for optimizer in optimizers.values():
            own = [variable for variable in optimizer.updated_variables if id(variable) in given]
            optimizer.apply([given[id(variable)] for variable in own], own)
        return used([], jit)

    return made(strategy, state, gradients_feed(strategy, variables, feed.order.batch_size), apply, jit)


def made(strategy, state: TrainState, feed, step: Callable, jit: bool = False) -> Part:
    """Makes a part of any replica code, (batch, step, observed) -> metrics."""
    strategy.bind(state, feed)
    return Part(feed, strategy.loop(step, jit))


def dense_variables(trainer: Trainer) -> list[tf.Variable]:
    """Returns the variables that the optimizers update, except tables, of which an update touches a few rows."""
    held = Holdings(trainer)
    tables = {id(shard) for shard in held.shards}
    updated = {id(v): v for optimizer in held.optimizers.values() for v in optimizer.updated_variables}
    return [variable for key, variable in updated.items() if key not in tables]


def gradients_feed(strategy, variables: Sequence[tf.Variable], batch_size: int):
    """Makes a feed whose batch is a gradient for each variable, small and the same at each step."""
    random = np.random.default_rng(0)
    values = [
        (_GRADIENT_SIZE * random.standard_normal(variable.shape, np.float32)).astype(variable.dtype.as_numpy_dtype)
        for variable in variables
    ]
    return strategy.repeated(values, batch_size)


def timed(
    strategy, state: TrainState, parts: Mapping[Any, Part], seconds: float, clock=time.perf_counter
) -> dict[Any, dict]:
    """Times parts in turn, A B C A B C, so that a drifting machine does not decide which takes longest.

    Args:
      strategy: of the run; left bound to the last part.
      state: of the run.
      parts: by name.
      seconds: about so long for each.
      clock: returns seconds.

    Returns:
      By name: seconds, repeats: timed in all, without warm-ups. ms_per_step: the one over the other. rounds_ms: the
      same in each turn.
    """
    length = Length(seconds=seconds / _TURNS)
    found: dict[Any, list] = {name: [] for name in parts}
    for _ in range(_TURNS):
        for name, part in parts.items():
            part.bind(strategy, state)
            found[name] += rounds.run(strategy, state, length, {}, clock)["rounds"]
    return {name: summary(turns) for name, turns in found.items()}


def summary(turns: Sequence[Mapping]) -> dict:
    """Returns a part's figures, of its rounds as `rounds.run` returns them."""
    seconds, repeats = (sum(each[name] for each in turns) for name in ("wall_seconds", "steps"))
    return {
        "seconds": seconds,
        "repeats": repeats,
        "ms_per_step": 1e3 * seconds / repeats,
        "rounds_ms": [1e3 * each["wall_seconds"] / each["steps"] for each in turns],
    }


def shares(parts: Mapping[str, dict | None]) -> dict[str, float]:
    """Returns the share of the whole step's time that each part takes.

    Args:
      parts: whole, step, input and update by name, with their `ms_per_step`; reduce too where there is one, and on a
        mesh that cuts the model own_step.

    Returns:
      step: the step without input, reduction and update: forward and backward. input, reduce, update: each by itself.
      model_sums: what a step takes longer by its sums over the mesh's axis `model`, taken from `step`.
      unexplained: what is left of the whole; below 0 where parts run in parallel.
    """
    ms = {name: part["ms_per_step"] for name, part in parts.items() if part and "ms_per_step" in part}
    model_sums = ms["step"] - ms["own_step"] if "own_step" in ms else 0.0
    times = {
        "step": ms["step"] - model_sums - ms.get("reduce", 0.0) - ms["update"],
        **({"model_sums": model_sums} if "own_step" in ms else {}),
        "input": ms["input"],
        "reduce": ms.get("reduce", 0.0),
        "update": ms["update"],
        "unexplained": ms["whole"] - ms["step"] - ms["input"],
    }
    return {name: time / ms["whole"] for name, time in times.items()}


def used(tensors: Sequence[tf.Tensor], jit: bool) -> dict[str, Mean]:
    """Returns a metric that needs all of the tensors, whole, at almost no cost: else they would not be computed."""
    if jit and tensors:  # XLA would compute only what the metric reads
        tensors = computed_whole(tensors)
    looked_at = [tf.reshape(tensor, [-1])[0] for tensor in tensors]
    numbers = [tf.cast(tf.strings.length(x) if x.dtype == tf.string else x, tf.float32) for x in looked_at]
    return {"loss": Mean(tf.add_n([tf.zeros([]), *numbers]), tf.ones([]))}
