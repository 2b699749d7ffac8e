"""Times a step's parts, each alone: `python -m benchmarks.parts --part=all --model=mlp --input=digits`.

Every flag but `--part` is one of `crankshaft train`; `crankshaft local --workers=2 -- -m benchmarks.parts ...` times
parts between processes. Each part is a program that does it and nothing else, so it is timed as the whole is: paced,
awaited, and agreed on by several processes. Within `TrainState.restoring` a part leaves no trace in the run. The chief
prints the figures as JSON:

- `whole`, `step` (on one batch again and again), `input` (batches that are used for nothing), `reduce` (sums of
  gradients that exist, with rates as nccl-tests defines them), `update` (the optimizer alone; with parameter servers
  with the way there), `own_step` (on a mesh that shards the model: without its sums over `model`): `seconds`,
  `repeats`, `ms_per_step`, `rounds_ms`.
- `checkpoint`: see `checkpoint`.
- with `--part=all`, timed in turn: `shares` of the whole, see `shares`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags
from tensorflow.compiler.tf2xla.python import xla

from crankshaft.engine.checkpoints import Checkpoints, WritingProcess
from crankshaft.engine.data.feeds.blocks import Devices
from crankshaft.engine.data.feeds.external_feed import ExternalFeed
from crankshaft.engine.data.feeds.feed import CallInput, Feed
from crankshaft.engine.data.order import Order
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.batches import pad_empty_batch
from crankshaft.engine.step.runner import StepRunner
from crankshaft.engine.strategies.base import Program
from crankshaft.engine.trainer import Trainer
from crankshaft.launch import assembly, program, train
from crankshaft.parts.benchmark.measure import rounds
from crankshaft.parts.benchmark.measure.rounds import Length
from crankshaft.parts.parameter_servers.strategy import ParameterServer
from crankshaft.parts.parameter_servers.worker_feeds import LeaseFeed, Workers
from crankshaft.runner.jit import choose_jit
from crankshaft.runner.modes.outcome import Outcome

PARTS = ("all", "whole", "step", "own_step", "input", "reduce", "update", "checkpoint")
_PART_SECONDS = 1.5
_TURNS = 3
_LATENCY_SECONDS = 0.5
_GRADIENT_SIZE = 1e-3
_CHECKPOINTS = 3
_WRITES = 2.0  # beside a checkpoint, steps are observed for so many times as long as the last write,
_MOST_SECONDS = 5.0  # but no longer than this


def whole(strategy, state: TrainState, feed, jit: bool) -> Program:
    """Makes all of a step: what users get."""
    return strategy.program("train", feed, jit)


def step(strategy, state: TrainState, feed, jit: bool) -> Program:
    """Makes whole steps on one batch of `feed`, again and again: no input."""
    return whole(strategy, state, repeated_batch(strategy, feed), jit)


def own_step(strategy, state: TrainState, feed, jit: bool) -> Program:
    """Makes whole steps on one batch, as `step`, without what sharded layers sum over the mesh's axis `model`."""
    runner, axis = StepRunner(state.trainer, strategy.mesh), strategy.mesh.model
    alone = {"all_reduce": lambda x: x, "all_gather": lambda x: tf.repeat(x[tf.newaxis], axis.size, axis=0)}

    def train(batch, step, collect_norm):
        with unittest.mock.patch.multiple(axis, **alone):
            return runner.train_batch(batch, step, collect_norm)

    return strategy.program(train, repeated_batch(strategy, feed))


def input(strategy, state: TrainState, feed, jit: bool) -> Program:
    """Makes batches of `feed`, gathered on each replica and used for nothing: no step."""
    jit = jit and feed.compilable

    def read(batch, *_):
        return used(tf.nest.flatten(pad_empty_batch(batch)[0]), jit)

    return strategy.program(read, feed, jit)


def update(strategy, state: TrainState, feed, jit: bool) -> Program:
    """Makes the optimizers' updates of all dense variables, by gradients that exist already.

    Where parameter servers make them, sending the gradients is included.
    """
    trainer = state.trainer
    variables, optimizers = dense_variables(trainer), Inventory(trainer).optimizers

    def apply(gradients, *_):
        gradient_of = dict(zip(map(id, variables), gradients, strict=True))
        for optimizer in optimizers.values():
            own = [variable for variable in optimizer.updated_variables if id(variable) in gradient_of]
            optimizer.apply([gradient_of[id(variable)] for variable in own], own)
        return used([], jit)

    return strategy.program(apply, gradients_feed(strategy, variables, feed.order.batch_size), jit)


def reduce(strategy, state: TrainState, feed, jit: bool = False, reduction: Reduction | None = None) -> Program:
    """Makes the sums over replicas of gradients that exist already, as the run makes them.

    By another `reduction` it sums no gradients: four bytes, which is its latency.
    """
    trainer = state.trainer
    variables = [] if reduction else dense_variables(trainer)
    averages = [] if reduction else Inventory(trainer).moving_statistics
    sums = reduction or trainer.reduction

    def add(gradients, *_):
        summed, count = sums.sum(list(gradients), tf.constant(1.0), averages, variables)
        return used([*summed, count], jit=False)

    return strategy.program(add, gradients_feed(strategy, variables, feed.order.batch_size))


def without_sums(strategy, state: TrainState) -> str | None:
    """Returns why there is no sum over replicas to time, or None if there is one."""
    if not strategy.updates_here:
        return "workers with parameter servers sum nothing"
    if strategy.num_replicas == 1:
        return "one replica has nobody to sum with"
    if state.trainer.reduction.sync_every_steps:
        return "replicas that meet every --sync_every_steps sum nothing in a step"
    return None


def figures_of_sums(strategy, state: TrainState, feed, ms_per_step: float) -> dict[str, float]:
    """Returns the rates of the model's sums over replicas, of their time, and times those of four bytes.

    Returns:
      What `rates_of_sums` returns, and latency_ms, of a sum of four bytes.
    """
    latency = {"latency": reduce(strategy, state, feed, reduction=Reduction())}
    return {
        **rates_of_sums(state.trainer.reduction, dense_variables(state.trainer), strategy.num_replicas, ms_per_step),
        "latency_ms": timed(strategy, latency, _LATENCY_SECONDS)["latency"]["ms_per_step"],
    }


def rates_of_sums(
    reduction: Reduction, variables: list[tf.Variable], replicas: int, ms_per_step: float
) -> dict[str, float]:
    """Returns a sum's rates, as nccl-tests defines them.

    See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Returns:
      bytes: of one replica's gradients in the dtype that they travel in; gb_per_sec: 1e9 of them a second;
      bus_gb_per_sec: what each replica's link carries: times 2 (n-1) / n for an all-reduce (float32; from three CPU
      workers on, small buckets that are gathered carry more), times n-1 for an all-gather (16 bits).
    """
    size = sum(reduction.reduce_dtype.size * variable.shape.num_elements() for variable in variables)
    rate = size / (1e6 * ms_per_step)
    factor = 2 * (replicas - 1) / replicas if reduction.reduce_dtype == tf.float32 else replicas - 1
    return {"bytes": size, "gb_per_sec": rate, "bus_gb_per_sec": factor * rate}


def dense_variables(trainer: Trainer) -> list[tf.Variable]:
    """Returns the variables that the optimizers update, except tables, of which an update touches a few rows."""
    inventory = Inventory(trainer)
    tables = {id(shard) for shard in inventory.shards}
    updated = {id(v): v for optimizer in inventory.optimizers.values() for v in optimizer.updated_variables}
    return [variable for key, variable in updated.items() if key not in tables]


def gradients_feed(strategy, variables: Sequence[tf.Variable], batch_size: int):
    """Makes a feed whose batch is a gradient for each variable, small and the same at each step."""
    random = np.random.default_rng(0)
    values = [
        (_GRADIENT_SIZE * random.standard_normal(variable.shape, np.float32)).astype(variable.dtype.as_numpy_dtype)
        for variable in variables
    ]
    return repeated(strategy, values, batch_size)


class Repeated(Feed):
    """The same values for every step."""

    compilable = True

    def __init__(self, values, batch_size: int):
        self.order, self._values = Order(batch_size, batch_size, block_steps=1), values

    def call_input(self, step: int, limit: int) -> CallInput:
        return CallInput((self._values,), step, step + limit)  # leases are counted by their steps

    def next_operands(self, operands, offset: tf.Tensor):
        return operands

    def batch(self, values):
        return values


class RepeatedOnWorkers(LeaseFeed, Repeated):
    """The same nest of arrays for every step, on each worker with parameter servers."""

    def __init__(self, workers: Workers, arrays, batch_size: int):
        super().__init__(workers.put_arrays(arrays), batch_size)
        self._specs = workers.specs(arrays)

    @property
    def operand_specs(self):
        return (self._specs,)


def repeated(strategy, arrays, batch_size: int) -> Repeated:
    """Makes a feed with the same nest of arrays for each step and replica; `batch_size` examples in total."""
    if isinstance(strategy, ParameterServer):
        return RepeatedOnWorkers(Workers(strategy.coordinator), arrays, batch_size)
    return Repeated(Devices(strategy.distribution, strategy.mesh).copy(arrays), batch_size)


def repeated_batch(strategy, feed) -> Repeated:
    """Makes a feed that repeats the first batch of another one's next epoch; with servers, of its data."""
    step, size = feed.order.epoch_from(strategy.state.step), feed.order.batch_size
    if isinstance(strategy, ParameterServer):
        split = feed.part.stream if feed.part else feed.read_by_workers or feed._source
        external = ExternalFeed(1, strategy.mesh).reading(split, 0, size, steps=1)
        examples, _ = external.call_input(0, 1).operands
        return repeated(strategy, tf.nest.map_structure(np.asarray, examples), size)
    operands, start, _ = feed.call_input(step, 1)

    def batch(operands, offset):
        return strategy.distribution.run(feed.batch, args=feed.next_operands(operands, offset))

    return Repeated(tf.function(batch, autograph=False)(operands, tf.constant(start, tf.int64)), size)


def timed(strategy, parts: Mapping[Any, Program], seconds: float, clock=time.perf_counter) -> dict[Any, dict]:
    """Times parts in turn, A B C A B C, so that a drifting machine does not decide which takes longest.

    Args:
      strategy: of the run.
      parts: by name.
      seconds: about so long for each.
      clock: returns seconds.

    Returns:
      By name: seconds, repeats: timed in all, without warm-ups. ms_per_step: the one over the other. rounds_ms: the
      same in each turn.
    """
    length = Length(seconds=seconds / _TURNS)
    turns_of: dict[Any, list] = {name: [] for name in parts}
    for _ in range(_TURNS):
        for name, part in parts.items():
            turns_of[name] += rounds.run(strategy, part, length, {}, clock)["rounds"]
    return {name: summary(turns) for name, turns in turns_of.items()}


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
        mesh that shards the model own_step.

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
        tensors = list(xla.optimization_barrier(*tensors))
    looked_at = [tf.reshape(tensor, [-1])[0] for tensor in tensors]
    numbers = [tf.cast(tf.strings.length(x) if x.dtype == tf.string else x, tf.float32) for x in looked_at]
    return {"loss": Mean(tf.add_n([tf.zeros([]), *numbers]), tf.ones([]))}


def checkpoint(strategy, state: TrainState, part: Program, folder: str, clock=time.perf_counter) -> dict:
    """Writes and restores a run's checkpoint, and trains while one is written.

    Args:
      strategy: of the run.
      state: what is saved; its step goes on.
      part: what goes on meanwhile.
      folder: an empty one of the chief's, on the disk that is meant; where variables are sharded over several
        processes, all of them see it.
      clock: returns seconds.

    Returns:
      Medians over `repeats`, whose own figures are in `samples`: mb: a checkpoint's files, in 2**20 bytes; write_ms,
      write_mb_per_sec: until they are on the disk; restore_ms, restore_mb_per_sec: verified and read; blocked_ms:
      until training may go on; stall_ms: how much longer the steps beside a write took than as many before it,
      blocked_ms included: about 0 if a write costs training nothing. seconds: all of it.
    """
    began = clock()
    checkpoints = Checkpoints(
        folder, state.checkpoint, keep=1, about={}, writer=WritingProcess(strategy.host, "benchmark")
    )
    bare = timed(strategy, {"bare": part}, 0.3, clock)["bare"]
    samples = []
    for _ in range(_CHECKPOINTS):
        save_seconds = _seconds(clock, lambda: checkpoints.save(state.step, state.host_state(), wait=True, force=True))
        manifest = checkpoints.latest() if strategy.is_chief else None
        restored = _seconds(clock, lambda: manifest and checkpoints.restore(manifest))  # noqa: B023
        seconds = min(_WRITES * save_seconds, _MOST_SECONDS)
        steps = strategy.exchange(max(1, round(1e3 * seconds / bare["ms_per_step"])))[0]
        before = _steps_seconds(strategy, part, steps, clock)
        blocked = _seconds(clock, lambda: checkpoints.save(state.step, state.host_state(), force=True))
        beside = _steps_seconds(strategy, part, steps, clock)
        checkpoints.wait()
        size = sum(each["bytes"] for each in manifest.files.values()) / 2**20 if manifest else 0.0
        samples.append(
            {
                "mb": size,
                "write_ms": 1e3 * save_seconds,
                "restore_ms": 1e3 * restored,
                "write_mb_per_sec": size / save_seconds,
                "restore_mb_per_sec": size / restored,
                "blocked_ms": 1e3 * blocked,
                "stall_ms": 1e3 * (blocked + beside - before),
            }
        )
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {"seconds": clock() - began, "repeats": _CHECKPOINTS, **medians, "samples": samples}


def measured(made, part: str) -> dict[str, Any]:
    """Returns the figures of a part, or of `all`, by name; every process makes the same calls."""
    strategy, state, feed = made.strategy, made.state, made.strategy.training.feed
    jit = strategy.training.jit
    make = {each.__name__: each for each in (whole, step, own_step, input, reduce, update)}
    why_no_sums = without_sums(strategy, state)
    names = [name for name in make if name != "own_step" or strategy.mesh.is_sharded] if part == "all" else [part]
    if why_no_sums and "reduce" in names:
        print(f"reduce is not timed: {why_no_sums}", file=sys.stderr)
        names.remove("reduce")
    with state.restoring():
        timed_parts = {name: make[name](strategy, state, feed, jit) for name in names if name in make}
        figures: dict[str, Any] = timed(strategy, timed_parts, _PART_SECONDS)
        if "input" in figures:
            figures["input"]["examples_per_sec"] = 1e3 * feed.order.batch_size / figures["input"]["ms_per_step"]
        if "reduce" in figures:
            figures["reduce"] |= figures_of_sums(strategy, state, feed, figures["reduce"]["ms_per_step"])
        if part == "all":
            figures["shares"] = shares(figures)
        if part in ("all", "checkpoint"):
            with tempfile.TemporaryDirectory(prefix="crankshaft-checkpoint-") as folder:
                folder = strategy.exchange(folder)[0]
                figures["checkpoint"] = checkpoint(strategy, state, step(strategy, state, feed, jit), folder)
    return figures


def main() -> None:
    part = flags.DEFINE_enum("part", "all", PARTS, "What is timed: a part of a step, or all in turn.")
    values = train.parse([sys.argv[0], "--mode=benchmark", *sys.argv[1:]])
    config = program.configure(values, None, False, os.environ)
    program.check(config)
    run = assembly.assemble_run(config, None, ())

    def measure(run) -> Outcome:
        print(choose_jit(run, None), file=sys.stderr)
        figures = measured(run, part.value)
        return Outcome(figures, report=json.dumps(figures, indent=1) if config.is_chief else "")

    run.execute_mode(measure)


def _seconds(clock, act) -> float:
    before = clock()
    act()
    return clock() - before


def _steps_seconds(strategy, part: Program, steps: int, clock) -> float:
    return sum(call.seconds for call in rounds.timed_round(strategy, part, steps, clock)[0])


if __name__ == "__main__":
    main()
