"""Computes a run's outputs and metrics, in the process that trains it. Host code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ...engine import Trainer
from ...engine.data import entry, form
from ...engine.data.arrays import ArraySource
from ...engine.data.data import Data
from ...engine.data.external_feed import ExternalFeed
from ...engine.data.source import Source, Split
from ...engine.data.streamed import Stream
from ...engine.hooks import evaluation
from ...engine.hooks.evaluation import averaged_weights
from ...engine.internals import keras
from ...engine.inventory import Inventory
from ...engine.mesh.mesh import Mesh
from ...engine.strategies.base import Strategy
from ..command_line import registry
from ..command_line.config import Config
from ..errors import UsageError
from . import data as datas
from . import external, weights
from .base import BaseRun
from .preprocessor import Preprocessor, check_trained

_MOST_UNSHARED_BYTES = 64 << 20  # of outputs, before the processes that compute them exchange theirs


class Predictor:
    """Computes a run's outputs of examples in their order, on all replicas, with the weights that evaluations use.

    Args:
      run: the run.
      name: of a Keras model that the trainer holds; None is `Trainer.forward`.

    Attributes:
      is_sharded: whether the model is sharded, so that replicas have shards of its outputs. Then a whole copy computes
        here, made when this object was.
    """

    def __init__(self, run: BaseRun, name: str | None = None):
        self._run = run
        self.is_sharded = run.strategy.mesh.is_sharded
        self._trainer = weights.alone(run)
        forward, taken = computed(self._trainer, run.example, name)
        self._taken = taken

        def outputs(features):
            made = forward(features, training=False)
            if scalars := [path for path, x in tf.keras.tree.flatten_with_path(made) if x.shape.rank == 0]:
                raise UsageError(
                    f"predict: the model's output {'.'.join(map(str, scalars[0])) or 'itself'} is one number, of no "
                    "example; leave it out where training is False, or give each example one, tf.fill"
                )
            return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32) if x.dtype.is_floating else x, made)

        @functools.cache
        def computing(is_shared: bool) -> Callable:
            def compute(features, number):
                if self.is_sharded:
                    return Strategy.on_replicas(run.strategy, outputs, features, number)
                return run.strategy.on_replicas(outputs, features, number, is_shared)

            # Called itself, a `tf.function` of each run would warn that it is traced again and again.
            compiled = tf.function(compute, autograph=False)
            return compiled.get_concrete_function(taken, tf.TensorSpec([], tf.int64))

        self._computing = computing

    def checked(self, data: Any, split: str | None = None) -> Split:
        """Converts the data passed to `Run.predict` to a `Source` or a `Stream`. Raises `UsageError`."""
        chosen = examples(self._run, self._taken, data, split)
        features = self._run.names.ids(form.features(form.example(chosen)))
        wanted = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), self._taken)
        spec, cure = form.element_spec(features), "model.predict takes other sizes, if the model does"
        external.check_like("features", wanted, spec, cure)
        return chosen

    def __call__(self, split: Split) -> Any:
        """Returns the outputs of a split that is `checked`, a nest of NumPy arrays, in each process all of them."""
        run = self._run
        done = _Gathered(run.strategy)
        averages = any(each.weight_average is not None for each in Inventory(self._trainer).optimizers.values())
        with averaged_weights(self._trainer) if averages else contextlib.nullcontext():
            for number, features in enumerate(features_of(run, split, run.config.eval_batch_size)):
                tensors = tf.nest.map_structure(tf.convert_to_tensor, features)
                examples = len(tf.nest.flatten(features)[0])
                compute = self._computing(examples < run.strategy.num_replicas)
                rows, outputs = compute(tensors, tf.constant(number, tf.int64))
                done.add(examples, rows.numpy(), [x.numpy() for x in tf.nest.flatten(outputs)])
        return tf.nest.pack_sequence_as(outputs, done.all())


class _Gathered:
    """The outputs of all examples in their order; each process computes some of them."""

    def __init__(self, strategy):
        self._strategy = strategy
        self._examples = 0
        self._mine: list[list[np.ndarray]] = []  # rows, and the outputs at them
        self._of_all: list[list[np.ndarray]] = []

    def add(self, examples: int, rows: np.ndarray, outputs: list[np.ndarray]) -> None:
        """Adds this process's outputs of a batch of so many examples, at these rows of it."""
        self._mine.append([rows + self._examples, *outputs])
        self._examples += examples
        # The same in all processes, whatever their shares.
        each = sum(int(np.prod(x.shape[1:])) * x.dtype.itemsize for x in outputs)
        if self._strategy.num_hosts > 1 and len(self._mine) * examples * each >= _MOST_UNSHARED_BYTES:
            self._share()

    def all(self) -> list[np.ndarray]:
        """Returns the outputs of all examples. All processes have to call it."""
        if self._strategy.num_hosts > 1:
            self._share()
        else:
            self._of_all = self._mine
        rows, *outputs = (np.concatenate(column) for column in zip(*self._of_all, strict=True))
        if len(rows) == self._examples and (np.diff(rows) == 1).all():
            return outputs
        whole = [np.empty((self._examples, *output.shape[1:]), output.dtype) for output in outputs]
        for each, output in zip(whole, outputs, strict=True):
            each[rows] = output  # where a copy of the model is sharded over replicas, each of them has its examples
        return whole

    def _share(self) -> None:
        if not self._mine:
            return
        file = io.BytesIO()
        np.savez(file, *(np.concatenate(column) for column in zip(*self._mine, strict=True)))
        for content in self._strategy.exchange_bytes(file.getvalue()):
            with np.load(io.BytesIO(content)) as arrays:
                self._of_all.append([arrays[name] for name in arrays.files])
        self._mine = []


class PredictableRun(Protocol):
    """The part of a `BaseRun` that prediction needs: its configuration, data and names.

    `features` are those of one example of its data, a nest of arrays or specs.
    """

    @property
    def config(self) -> Config: ...

    @property
    def known(self) -> Data: ...

    @property
    def logits_of(self) -> str | None: ...

    @property
    def names(self) -> Preprocessor: ...

    @property
    def features(self) -> Any: ...

    @property
    def splits(self) -> Mapping[str, Source | Stream]: ...


def examples(run: PredictableRun, features: Any, data: Any, split: str | None) -> Split:
    """Returns the data to predict on as a `Source` or a `Stream`; see `Run.predict`.

    Args:
      run: has its own data and the names of its numbers.
      features: nest of arrays or specs [examples, ...], as the model takes them.
      data: see `Run.predict`.
      split: see `Run.predict`.

    Raises:
      UsageError: the split or input does not exist, or the data has an unknown form.
    """
    if data is None:
        return _named(run.splits, split)
    if isinstance(data, str):
        return _named(of_input(run, data), split)
    if split is not None:
        raise UsageError(f"split={split!r} is one of the run's own data or of a named input's; give it or data")
    rules = entry.Rules(weighs_outputs=True, look_up=run.names.ids, may_lack=bool(run.known.preprocessing))
    return entry.features(data, len(tf.nest.flatten(features)[0].shape), rules)


def features_of(run: PredictableRun, split: Split, size: int) -> Iterator[Any]:
    """Reads a split's features as the model takes them, in batches."""
    return (run.names.ids(form.features(batch)) for batch in _batches(split, size))


def _batches(split: Split, size: int) -> Iterator[Any]:
    """Reads a split in its order: nests of tensors [n, ...] of up to `size` examples."""
    if isinstance(split, ArraySource):  # which may have no example
        examples = np.arange(len(split))
        yield from (split.read(examples[at : at + size]) for at in range(0, max(len(examples), 1), size))
        return
    feed = ExternalFeed(1, Mesh())
    feed.set_data(split, 0, size)
    try:
        for step in range(feed.order.steps_per_epoch):
            yield feed.take(step, 1).operands[0]
    finally:
        feed.close()


def _named(own: Mapping[str, Source | Stream], name: str | None) -> Split:
    """Returns a split by its name, read as evaluations read it; None is the split of evaluations, if any."""
    name = name or ("eval" if "eval" in own else "train")
    if name not in own:
        raise UsageError(f"split={name!r}: the run's data has no such split; it has {', '.join(own)}")
    chosen = own[name]
    return chosen.for_evaluation() if chosen.by_index else chosen


def of_input(run: PredictableRun, name: str) -> Mapping[str, Source | Stream]:
    """Returns the splits, "train" and "eval", of an input that comes with Crankshaft, or of a file, by its name."""
    config = run.config
    registry.check_name("input", name)
    if name != config.input:
        config = dataclasses.replace(config, input=name, input_arg={}, data_dir=None, eval_data_dir=None)
    loaded = datas.load(config)
    if (loaded.vocabulary or loaded.tokens) and loaded.ids != run.known.ids:
        raise UsageError(
            f"predict({name!r}): it numbers ids by its own examples, and the model by those it was trained on; give "
            "the columns as arrays, predict({'city': ['Rome']})"
        )
    entered, _ = datas.enter(config, loaded)
    train, evaluation = entered.train, entered.evaluation
    check_trained(f"predict({name!r})", (run.known, run.features), (loaded, form.features(train.element_spec)))
    return {"train": train} if evaluation is None else {"train": train, "eval": evaluation}


def computed(trainer: Trainer, example, name: str | None) -> tuple[Callable[..., Any], Any]:
    """Returns what computes outputs, and specs of the features that it takes, of batches of any size.

    Args:
      trainer: of the run.
      example: of its data.
      name: of a Keras model that the trainer holds; None is `Trainer.forward`.
    """
    if name is None:
        return trainer.forward, _features_taken(trainer, example)
    model = weights.named(trainer, name)
    own = keras.inputs_of(model)
    return model, _any_size(form.features(example) if own is None else own)


def _features_taken(trainer: Trainer, example) -> Any:
    """Returns specs of the features that `forward` takes.

    They are the data's, or those of the model's own inputs where it takes no others, as of a GAN's noise.
    """
    of_data = _any_size(form.features(example))
    if type(trainer).forward is not Trainer.forward or (own := keras.inputs_of(trainer.model)) is None:
        return of_data
    shapes, own_shapes = ([each.shape for each in tf.nest.flatten(x)] for x in (of_data, own))
    if len(shapes) == len(own_shapes) and all(map(tf.TensorShape.is_compatible_with, shapes, own_shapes)):
        return of_data
    try:
        tf.function(trainer.forward, autograph=False).get_concrete_function(of_data, training=False)
    except (TypeError, ValueError):  # as Keras has it of other features
        return _any_size(own)
    return of_data


def _any_size(features) -> Any:
    """Returns specs of batches of any size, and of any length where examples differ in it."""
    spec = form.element_spec(features)
    return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape], tf.as_dtype(x.dtype)), spec)


def evaluate(run: BaseRun, split=None) -> dict[str, float]:
    """Computes the metrics' means over a split; None is the run's own evaluation data.

    Raises:
      UsageError: the split is not of the run's form, or the run has no evaluation data.
    """
    if split is None:
        if not run.has_evaluation:
            raise UsageError("evaluate(): the run has no evaluation data; give evaluate a split")
        return evaluation.evaluate(run.strategy, run.state)
    with contextlib.closing(external.program(run, "eval", split)) as program:
        return evaluation.evaluate(run.strategy, run.state, program)
