"""Compares what a run's variables need with the memory and the disk that are left, before there are any."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from ..engine import logging
from ..engine.data.arrays import is_on_gpus
from ..engine.internals import keras_state
from ..engine.machine import files, memory
from ..engine.state import TrainState
from ..engine.strategies.base import Strategy
from ..engine.strategies.dry_run import dry_run
from .command_line.config import Config
from .failures import RunError, UsageError

_SNAPSHOTS = 2  # in memory, if there is room for them


class _TooLarge(BaseException):  # no Exception, so that no model's code handles it
    """The variables may need more than half of what is left."""


class FreeBytes(NamedTuple):
    """The bytes that are left of memory, and for a checkpoint on the disk; infinity if none are needed there."""

    memory: float
    disk: float


def build(config: Config, strategy: Strategy, make: Callable[[], TrainState]) -> TrainState:
    """Calls `strategy.build(make)`, unless variables, or a checkpoint of them, need more than is left.

    Variables that certainly take less than half are created at once. Otherwise the build stops before it has taken a
    sixth, is repeated in a graph, which allocates nothing, to sum up the bytes, and only then creates the variables.

    Raises:
      UsageError: there is too little memory.
      RunError: there is too little space on the disk, where more may come to be free.
    """
    on_gpus = is_on_gpus(strategy.distribution)  # TensorFlow itself reports a lack of their memory
    disk = files.free_bytes(config.run_dir) if config.run_dir and config.writes_run and not config.remote else math.inf
    here = FreeBytes(math.inf if on_gpus else memory.available_bytes(), disk)
    free = FreeBytes(*map(min, zip(*strategy.exchange(here), strict=True)))
    # The copies of the variables that share this machine's memory, at least.
    processes = len(config.cluster.addresses) if config.cluster and config.cluster.is_on_one_host else 1
    copies = processes * (1 if strategy.mesh.is_sharded else len(strategy.distribution.extended.worker_devices))
    most = min(free.memory / copies, free.disk) / (2 * (1 + _SNAPSHOTS))

    def make_small() -> TrainState:
        with _limited(most):
            return make()

    # Keras numbers the names of layers in its state, and an attempt that stops half-way must leave no gap in them.
    names = keras_state.exchange_state({})
    copied = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in names.items()}
    keras_state.exchange_state(copied)
    try:
        return strategy.build(make_small)
    except _TooLarge:
        keras_state.exchange_state(names)  # Keras's names as before the attempt
    gc.collect()  # frees the variables that were
    if needed := sum(variable.weight for variable in dry_run(make)):  # else unknown
        _compare(config, needed, copies, free)
    return strategy.build(make)


@contextlib.contextmanager
def _limited(most: float) -> Iterator[None]:
    """Raises `_TooLarge` in this context before or, if its size is not known before, after a variable that exceeds."""
    created = 0

    def create(next_creator: Callable[..., tf.Variable], **keywords: Any) -> tf.Variable:
        nonlocal created
        value, dtype = keywords.get("initial_value"), keywords.get("dtype")
        shape = keywords.get("shape")
        shape = keras_state.initial_shape(value) if shape is None else shape
        size = 0 if shape is None or dtype is None else _bytes(shape, dtype)
        if created + size > most:
            raise _TooLarge
        variable = next_creator(**keywords)
        created += _bytes(variable.shape, variable.dtype)
        if created > most:
            raise _TooLarge
        return variable

    with tf.variable_creator_scope(create):
        yield


def _bytes(shape: Any, dtype: Any) -> int:
    return (tf.TensorShape(shape).num_elements() or 0) * tf.as_dtype(dtype).size


def _compare(config: Config, needed: int, copies: int, free: FreeBytes) -> None:
    """Logs a line if variables of these bytes need over half of what is free. Raises an error if more than it."""
    in_memory, model = copies * needed, f"the variables of {config.model_entry.name}, with the optimizer state"
    copied = _SNAPSHOTS * needed if free.disk < math.inf and config.snapshot_seconds else 0
    if in_memory + copied > free.memory / 2:
        snapshots = f" ({_mib(in_memory + copied)} with {_SNAPSHOTS} snapshots)" if copied else ""
        has_tables = "table_capacity" in config.model_entry.defaults
        tables = "fewer rows (model_arg=hash_buckets=N or table_capacity=N), " * has_tables
        line = (
            f"{model}, take {_mib(in_memory)} in memory{snapshots}, of which {_mib(free.memory)} are left; use {tables}"
            "several servers (num_ps), devices that share a model (mesh), or a smaller model"
        )
        if in_memory > free.memory:
            raise UsageError(line)
        logging.warning("%s", line)
    if needed > free.disk / 2:
        is_full = needed > free.disk
        line = (
            f"run_dir={config.run_dir}: its disk is {'full' if is_full else 'nearly full'}: a checkpoint of {model}, "
            f"takes {_mib(needed)}, and {_mib(free.disk)} are free; free space on it, or use a run_dir on another"
        )
        if is_full:
            raise RunError(line)
        logging.warning("%s", line)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
