"""Computes a run's outputs and metrics, as programs of its strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ...engine.build import prepare
from ...engine.data import form
from ...engine.data.arrays import ArraySource
from ...engine.data.entry import user_data, views
from ...engine.data.feeds import combined
from ...engine.data.run_data import Data
from ...engine.data.source import Source, Split
from ...engine.data.streamed import Stream
from ...engine.hooks.evaluation import averaged_weights
from ...engine.internals import keras_calls
from ...engine.metrics.predictions import Collector
from ...engine.state import TrainState
from ...engine.step.options import RunContext
from ...engine.strategies.base import Prediction, Strategy
from ...engine.strategies.replicated import Replicated
from ...engine.trainer import Trainer
from ..base import BaseRun
from ..command_line import registry
from ..command_line.config import Config
from ..data import loading
from ..data.inputs import eval_batch_size
from ..failures import UsageError
from ..host import isolation
from ..restored import weights
from ..saved import architecture
from ..saved.preprocessor import Names, check_trained
from . import external

# 2^32 divided by the golden ratio: batches of different calls have different numbers, also in the lower 32 bits, of
# which XLA makes samples.
_APART = 0x9E3779B1


class Predictor:
    """Computes a run's outputs of examples in their order, on all replicas, with the weights that evaluations use.

    Args:
      name: name of a Keras model that the trainer holds; None is `Trainer.forward`.

    Attributes:
      is_copy: whether a whole copy of the model computes, in each process, made when this object was: if the model is
        sharded, so that replicas have shards of its outputs, or the strategy returns no outputs.
    """

    def __init__(self, run: BaseRun, name: str | None = None):
        self._run = run
        self.is_copy = run.strategy.mesh.is_sharded or not run.strategy.predicts
        self._strategy = on_one_device(weights.copy_trainer(run)) if self.is_copy else run.strategy
        self._trainer = self._strategy.state.trainer
        forward, self._features = forward_and_features(self._trainer, run.example, name)
        self._prediction = Prediction(forward)
        models = architecture.keras_models(self._trainer)
        self._has_step = name is None and any(keras_calls.overrides(model, "predict_step") for model in models.values())

    def checked(self, data: Any, split: str | None = None) -> Split:
        """Converts the data passed to `Run.predict` to a `Source` or a `Stream`. Raises `UsageError`."""
        chosen: Any = prediction_split(view_run(self._run), self._features, data, split, self._has_step)
        wanted = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), self._features)
        chosen = views.with_floats_like(chosen, (wanted,))
        features = form.features(form.example(chosen))
        spec, fix = form.element_spec(features), "model.predict takes other sizes, if the model does"
        external.check_like(self._run, "features", wanted, spec, fix)
        return chosen

    def __call__(
        self,
        split: Split,
        number: int = 0,
        ends: Callable[[], str | None] = lambda: None,
        is_own: bool = False,
    ) -> Any:
        """Computes the outputs of a split that is `checked`, a nest of NumPy arrays, in each process all of them.

        Args:
          number: number of the run's calls of `predict` before this one; each samples others.
          ends: see `Strategy.evaluate`; processes that each compute alone are not interrupted.
          is_own: whether each process gives examples of its own, and has the outputs of these.
        """
        config = self._run.config
        size = eval_batch_size(config, split) if self._has_step else config.eval_batch_size
        is_together = self._run.strategy.num_hosts == self._strategy.num_hosts
        options: dict[str, Any] = {"ends": ends} if is_together else {}
        optimizers = self._trainer.inventory.optimizers.values()
        has_averages = any(optimizer.weight_average is not None for optimizer in optimizers)
        with averaged_weights(self._trainer) if has_averages else contextlib.nullcontext():
            return _outputs(self._strategy, self._prediction, split, size, number, is_own=is_own, **options)


def model_predictor(model: tf.keras.Model, check: Callable[[Any], Any]) -> Callable[[Split, int], Any]:
    """Makes a function that computes a Keras model's outputs on this process's device, with the weights that it has.

    It takes a split and how many examples are computed at a time, and returns a nest of NumPy arrays.

    Args:
      check: returns the features that it gets, a nest of arrays or tensors [n, ...].
    """
    with isolation.Isolation().entered():
        strategy = on_one_device(prepare(_Holder(model), RunContext()))
    # One prediction for all calls, so that it is compiled once.
    prediction, numbers = Prediction(_caller(model)), itertools.count()
    return lambda split, size: _outputs(strategy, prediction, split, size, next(numbers), check)


class _Holder(Trainer):
    """Holds a model whose variables exist."""

    def __init__(self, model: tf.keras.Model):
        super().__init__()
        self.model = model

    def build(self) -> None:
        return


def on_one_device(trainer: Trainer) -> Strategy:
    """Returns a strategy for predictions of a built trainer on this process's device."""
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy(tf.zeros([]).device))  # by its full name
    state = TrainState(trainer)
    with strategy.scope():
        state.build()
    strategy.bind(state)
    return strategy


def _predict(forward: Callable[..., Any], features: Any) -> Any:
    """Computes outputs as users get them: those of 16-bit floats are float32, and others keep their dtypes."""
    with keras_calls.predicting():
        outputs = forward(features, training=False)
    if any(output is None for output in tf.nest.flatten(outputs)):
        raise UsageError("an output of the model is None, so it has no predictions; predict with a model of the others")
    return tf.nest.map_structure(keras_calls.in_float32, outputs)


def _caller(model: tf.keras.layers.Layer) -> Callable[[Any], Any]:
    return functools.partial(_predict, functools.partial(keras_calls.call, model))


def _outputs(
    strategy: Strategy,
    prediction: Prediction,
    split: Split,
    size: int,
    number: int,
    check: Callable[[Any], Any] = lambda features: features,
    is_own: bool = False,
    **ends: Any,
) -> Any:
    """Executes a prediction's program on the features of a split, each checked; a nest of NumPy arrays."""
    # Without examples, one of zeros is predicted and left out, so that outputs have their shapes and dtypes.
    is_empty, collector = isinstance(split, ArraySource) and not len(split), Collector()
    features = views.features(ArraySource(form.example(split)) if is_empty else split, check)
    with contextlib.closing(strategy.external(prediction, features, size, is_own=is_own)) as program:
        program.first_batch = number * _APART
        strategy.evaluate(program, keep=collector.add, **ends)
    return tf.nest.map_structure(lambda x: x[:0], collector.all()) if is_empty else collector.all()


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run as predictions see it, without its state, which may be large.

    Attributes:
      features: features of one example of the run's data, a nest of arrays or specs.
      logits_kind: kind of the trainer's logits.
      get_config: returns the run's configuration. Raises `UsageError` where that of a saved run can't be read.
      get_splits: returns the run's data, as `Data.splits`. Raises `UsageError` where that of a saved run can't be
        read.
    """

    data_info: Data
    names: Names
    features: Any
    logits_kind: str | None
    get_config: Callable[[], Config]
    get_splits: Callable[[], Mapping[str, Source | Stream]]


def view_run(run: BaseRun) -> RunView:
    """Makes what predictions need of a run that trains; its configuration and splits may change later."""
    config, splits = run.config, run.splits
    return RunView(run.data_info, run.names, run.features, run.logits_kind, lambda: config, lambda: splits)


def prediction_split(
    run: RunView, features: Any, data: Any, split: str | None, keeps_batch_size: bool = False
) -> Split:
    """Returns the data to predict on as a `Source` or a `Stream`; see `Run.predict`.

    Args:
      features: nest of arrays or specs [examples, ...], as the model takes them.
      keeps_batch_size: see `user_data.Rules`.

    Raises:
      UsageError: the split or input does not exist, or the data has an unknown form.
    """
    if data is not None and not isinstance(data, str):
        if split is not None:
            raise UsageError(f"split={split!r} is one of the run's own data or of a named input's; give it or data")
        rules = external.rules(run.names, features, weighs_outputs=True)
        return user_data.features(data, dataclasses.replace(rules, keeps_batch_size=keeps_batch_size))
    splits = run.get_splits() if data is None else input_splits(run, data)
    name = split or ("train" if splits.keys() == {"train"} else "eval")
    if name not in splits:
        raise UsageError(f"split={name!r}: the run's data has no such split; it has {', '.join(splits)}")
    chosen = combined.first(splits[name])
    return chosen.for_evaluation() if chosen.by_index else chosen


def input_splits(run: RunView, name: str) -> Mapping[str, Source | Stream]:
    """Loads the splits, as `Data.splits`, of an input that comes with Crankshaft, or of a file, by its name."""
    config = run.get_config()
    registry.check_name("input", name)
    if name != config.input:
        config = dataclasses.replace(config, input=name, input_arg={}, data_dir=None, eval_data_dir=None)
    loaded = loading.load(config, run.data_info)
    if (loaded.vocabulary or loaded.tokens) and loaded.ids != run.data_info.ids:
        raise UsageError(
            f"predict({name!r}): it numbers ids by its own examples, and the model by those it was trained on; give "
            "the columns as arrays, predict({'city': ['Rome']})"
        )
    entered, _ = loading.enter(config, loaded)
    train = entered.train
    now = loaded, form.features(train.element_spec)
    check_trained(f"predict({name!r})", (run.data_info, run.features), now)
    return entered.splits


def forward_and_features(trainer: Trainer, example, name: str | None) -> tuple[Callable[..., Any], Any]:
    """Returns the function that computes outputs, and specs of the features that it takes, of batches of any size.

    They are the data's features, or those of a model's own inputs if it takes no others, as of a GAN's noise.

    Args:
      name: name of a Keras model that the trainer holds; None is `Trainer.forward`.
    """
    data_features = _batch_specs(form.features(example))
    if name is not None:
        model = weights.keras_model(trainer, name)
        inputs = keras_calls.symbolic_inputs(model)
        return _caller(model), data_features if inputs is None else _batch_specs(inputs)
    forward = functools.partial(_predict, trainer.forward)
    if type(trainer).forward is not Trainer.forward or (inputs := keras_calls.symbolic_inputs(trainer.model)) is None:
        return forward, data_features
    shapes, input_shapes = ([spec.shape for spec in tf.nest.flatten(specs)] for specs in (data_features, inputs))
    if len(shapes) == len(input_shapes) and all(map(tf.TensorShape.is_compatible_with, shapes, input_shapes)):
        return forward, data_features
    try:
        tf.function(forward, autograph=False).get_concrete_function(data_features)
    except (TypeError, ValueError):  # Keras's errors for other features
        return forward, _batch_specs(inputs)
    return forward, data_features


def _batch_specs(features) -> Any:
    """Makes specs of batches of any size, and of any length where examples differ in it."""
    spec = form.measured(form.element_spec(features))
    return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape], tf.as_dtype(x.dtype)), spec)
