"""A compiled Keras model as a `Trainer`, trained by the engine's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine import logging
from ...engine.build import build_layers, make_optimizer, make_variables
from ...engine.data import form
from ...engine.errors import UsageError, counted, reason
from ...engine.internals import graphs, keras, keras_calls, keras_copy, keras_optimizers, keras_scopes, keras_state
from ...engine.internals.variables import tracked_variables
from ...engine.mesh.layout import current_mesh
from ...engine.metrics.means import FEW_CLASSES, confusion_matrix, weighed_by
from ...engine.metrics.pairs import Mean, Pair, SumOfMeans
from ...engine.optimizers import KerasOptimizer
from ...engine.optimizers.loss_scale import DynamicLossScale
from ...engine.step import batches, diagnosis
from ...engine.step.context import StepContext, TracedLoss, step_context
from ...engine.step.gathering import gather_together
from ...engine.step.gradients import BatchLosses
from ...engine.trainer import Trainer
from . import keras_compile, keras_internals, own_step, trials
from .compiled_model import check, step_options
from .keras_metrics import KerasMetric

_NOT_UPDATED = (
    "{} has the metric {}, which neither its layers' call nor compute_loss updates; pass it to compile(metrics=), or "
    "write a crankshaft.Trainer with build_model, loss and metrics"
)
_OWN = "compute_loss"
_SAVED_PLACES = "an attribute of the model, a layer, a constraint or a tf.keras.losses.Loss (also in a list)"
_UPDATES = "_updates_by_runs"  # the attribute of a model that counts them
_PROCESS_STRATEGIES = (  # strategies that exist before a model does, or that a run prepares
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)
_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Trace(NamedTuple):
    """What a trace of a model and its losses shows.

    Attributes:
      updates: the arguments of each update of a metric that layers keep, or that `compute_loss` updates, by its name.
      is_masked: whether a model with its own `compute_loss` masks outputs.
      compared: the numbers to which losses compare labels.
    """

    outputs: Any
    updates: dict[str, list[tuple]]
    is_masked: bool
    compared: set[float]


class KerasTrainer(Trainer):
    """Trains a compiled Keras model: `KerasTrainer.for_model(model)` is a trainer class for a run.

    Optimizer, losses by output with their weights, metrics and weighted metrics are those of `compile`. On any number
    of replicas it minimizes what Keras's `fit` minimizes on one device: each loss is divided by the count over the
    global batch, weights count as in Keras (a weighted sum over the batch's size), as do masks. Metrics are Keras's
    over all examples. The optimizer's clipping is applied to the sum across replicas, and a `LossScaleOptimizer`
    becomes the engine's loss scale. A loss that is not a mean over examples, such as `Dice` and losses of pairs, is
    computed of the global batch, whose outputs and labels each replica gathers. A trial detects such losses: the mean
    of two small random batches together has to be the average of both. A model's own `compute_loss` is the mean of a
    batch, with what it adds of `self.losses`; metrics that it or layers update are reported.

    Args:
      **arguments: the keywords of the function that makes the model.

    Attributes:
      first_names: the names of a training step's metrics as the run began, by what they are without Keras's numbers.
      evaluates_any_size: whether an evaluation's step may be traced without its batch's size, as Keras traces it.
      wants_jit: whether it is compiled with `jit_compile`.
      weighs_outputs: whether weights may be per output, or per step of a sequence, as in Keras's `fit`: labels then are
        `WeighedLabels`; weights of whole examples are the data's.

    Raises:
      UsageError: the model is not a Keras model.
      UsageError: it can't be trained as it is; the message names the equivalent method of `Trainer`.

    Example:
      >>> def line(units=1):
      ...     model = tf.keras.Sequential([tf.keras.layers.Dense(units)])
      ...     model.compile("sgd", "mse")
      ...     return model
      >>> issubclass(KerasTrainer.for_model(line), Trainer)  # crankshaft.run(KerasTrainer.for_model(line), data=...)
      True
    """

    make: Callable[..., tf.keras.Model]
    first_names: dict[str, list[str]]
    weighs_outputs = evaluates_any_size = True

    def __init__(self, **arguments):
        super().__init__()
        self._arguments = arguments
        self._own_steps: own_step.OwnSteps | None = None
        self.__dict__["first_names"] = {}  # no part of checkpoints' variables

    @classmethod
    def for_module(cls, module: types.ModuleType) -> type[KerasTrainer] | None:
        """Returns a trainer class for a module's function `model`, which makes a compiled model; None without one."""
        model = getattr(module, "model", None)
        return cls.for_model(model) if callable(model) else None

    @classmethod
    def for_model(cls, model: tf.keras.Model | Callable[..., tf.keras.Model]) -> type[KerasTrainer]:
        """Returns a trainer class for a compiled model, or for a function that returns one.

        One device trains the model itself. Otherwise it is copied, with its weights and its optimizer's state, into the
        strategy's scope, and has the run's after each call, also one that fails: if Keras can't recreate it from its
        configuration, pass a function. The function's keywords are the trainer's `model_arg`s.
        """
        keras_calls.refuse_keras_2(model)
        is_built = isinstance(model, tf.keras.layers.Layer)
        if is_built:
            check(model)
        elif not callable(model):
            raise UsageError(f"{model!r:.60} is not a Keras model; pass a compiled one, or a function that makes it")
        make = (lambda: model) if is_built else model
        name = type(model).__name__ if is_built else getattr(model, "__name__", cls.__name__)
        doc = inspect.getdoc(type(model) if is_built else model)

        def __init__(self, **arguments):
            cls.__init__(self, **arguments)

        # A run checks `model_arg` by the constructor's signature.
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [
            parameter for parameter in inspect.signature(make).parameters.values() if parameter.kind not in _COLLECTS
        ]
        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in named]
        __init__.__signature__ = inspect.Signature([self_parameter, *parameters])  # type: ignore[attr-defined]
        content = {"__doc__": doc, "__init__": __init__, "make": staticmethod(make), "is_built": is_built}
        return type(name, (cls,), {**content, "default_policy": keras_state.default_policy()})

    @classmethod
    def strategy(cls) -> tf.distribute.Strategy | None:
        """Returns the strategy in whose scope the model was made; None if it does not exist yet.

        Raises:
          UsageError: it is one that this process can't train it under alone.
        """
        if not cls.is_built:
            return None
        made_in = keras_optimizers.scope_strategy(cls.make())
        if isinstance(made_in, _PROCESS_STRATEGIES):
            raise UsageError(
                f"the model was made in the scope of {type(made_in).__name__}, which the run has to make itself; pass "
                "a function that makes the model, and strategy"
            )
        return made_in

    @classmethod
    def trains_in_place(cls, distribution: tf.distribute.Strategy) -> bool:
        """Returns whether the model itself is trained: it was made in this strategy's scope, or for one device in none.

        One that a function makes is made where it is trained.
        """
        on_one = isinstance(distribution, tf.distribute.OneDeviceStrategy)
        if not cls.is_built:
            return on_one
        model = cls.make()
        optimizers = [getattr(one, "inner_optimizer", one) for one in keras_internals.optimizers_in(model).values()]
        parts = model, *optimizers
        return all(
            not keras_internals.has_strategy(x) if on_one else keras_optimizers.scope_strategy(x) is distribution
            for x in parts
        )

    @classmethod
    def build_passed(cls, example: Any) -> None:
        """Builds the model that was passed, where it was made, as by Keras, from the program's random numbers."""
        model = cls.make()
        if any(keras_calls.overrides(model, method) for method in own_step.METHODS):
            return  # it can't be copied
        with keras_optimizers.scope_strategy(model).scope():
            make_variables(type(model).__name__, model, form.features(example))

    def build(self) -> None:
        source = type(self).make(**self._arguments)
        check(source, trains=not self.run_context.only_predicts)
        if keras_calls.overrides(source, "predict"):
            logging.warning(
                "%s overrides predict, which run.predict does not call: that gives the data to the model's call",
                type(source).__name__,
            )
        self.run_context = dataclasses.replace(
            self.run_context,
            options=step_options(self.run_context.options, source, self.is_built),
            saved_places=_SAVED_PLACES,
        )
        is_itself = self.run_context.in_place or not self.is_built
        # Averages are handed over from a copy: what can't be copied is found before the first step.
        needs_copy = not is_itself or (self.is_built and self.run_context.options.ema_decay > 0)
        self.model = source
        if own := [method for method in own_step.METHODS if keras_calls.overrides(source, method)]:
            self._build_own_steps(own[0], needs_copy)
            return
        if self.run_context.evaluation is not None:
            examples = (self.run_context.example, self.run_context.evaluation[0])
            form.check_same_fields(*(form.values(form.element_spec(x)) for x in examples))
        if is_itself:  # before the copy, which samples too
            build_layers(self, source)
        copy = self._copied(source) if needs_copy else source
        if not is_itself:
            self.model = copy
            build_layers(self, copy)
        in_losses = tracked_variables(types.SimpleNamespace(**keras_compile.arguments(source)))
        listed = {id(variable) for variable in self.model.variables}
        self.loss_variables = [variable for variable in in_losses.values() if id(variable) not in listed]
        self.wants_jit = bool(source.jit_compile)
        keras_compile.compile_values(source)  # before callbacks set others
        self._build_optimizer(source)
        if not self.run_context.only_predicts:
            self._build_losses()
        self.compiled_state = keras_compile.CompiledState(self.model)

    def _copied(self, source: tf.keras.Model) -> tf.keras.Model:
        """Returns a built copy of a compiled model, with its weights if it has any."""
        # Layers are compared with their copies when both are built, or neither: building adds variables and attributes.
        with _by_configuration(source):
            copy = keras_copy.copied(source)
            if keras_calls.overrides(copy, "compile_from_config"):  # its own `compile` may take other arguments
                copy.compile_from_config(tf.keras.utils.serialize_keras_object(source.get_compile_config()))
            else:
                copy.compile(**keras_compile.arguments(source))
            if not source.built:
                keras_copy.complete(source, copy)
        build_layers(self, copy)
        if source.built:
            with _by_configuration(source):
                keras_copy.complete(source, copy)
            keras_copy.copy_state(source, copy)
        return copy

    def _build_own_steps(self, method: str, needs_copy: bool) -> None:
        """Builds a model that overrides a step of Keras's loop: with what the trace of its steps makes and applies."""
        if needs_copy:
            raise UsageError(
                f"{type(self.model).__name__} overrides {method}, and can't be copied to where it would be trained; "
                "pass a function that makes and compiles the model"
            )
        self.wants_jit = bool(self.model.jit_compile)
        if self.run_context.only_predicts:  # what the optimizers are applied to is unknown
            if self.run_context.options.ema_decay:
                raise UsageError(
                    f"ema_decay: {type(self.model).__name__}.{method} decides which weights are averaged, and only the "
                    "features of its data are known here; take the model of a run with the data (open_run)"
                )
            owners = {path.partition(".")[0] for path in keras_internals.optimizers_in(self.model)}
            self.optional_in_checkpoint = ("own_",)
            vars(self.model)["optional_in_checkpoint"] = tuple(f"{owner}/" for owner in owners)
            if keras_calls.has_call(self.model):
                build_layers(self, self.model)
        else:
            vars(self.model).pop("optional_in_checkpoint", None)  # of one that was loaded to predict
            self.run_context = dataclasses.replace(self.run_context, reports_loss=False)  # it may return none
            self._own_steps = own_step.OwnSteps(self, self._to_data)
            self._own_steps.build(self._adopt)
            # As attributes, so that checkpoints have them.
            self.own_optimizers, self.own_loss_scales = self._own_steps.optimizers, self._own_steps.loss_scales
        self.compiled_state = keras_compile.CompiledState(self.model)

    def _adopt(self, optimizer: tf.keras.optimizers.Optimizer, variables: Sequence) -> KerasOptimizer:
        """Makes the engine's optimizer of one that the model applies itself to variables."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if inner.built:
            variables = keras_copy.updated_by(inner)
        engines = make_optimizer(self, variables, KerasOptimizer(inner, as_compiled=True))
        if not optimizer.built:  # a LossScaleOptimizer
            optimizer.build(variables)
        return engines

    def _to_data(self, batch) -> Any:
        """Converts a batch to what Keras's `fit` passes to a step: x, (x,), (x, y) or (x, y, sample_weight)."""
        fields = form.fields(form.map_padded(self._unwrap_padded, batch))
        labels, weights = self._weighed(fields.labels)
        return tf.keras.utils.pack_x_y_sample_weight(
            fields.features, labels, fields.weights if weights is None else weights
        )

    def _build_optimizer(self, source: tf.keras.Model) -> None:
        scaled = source.optimizer
        inner = getattr(scaled, "inner_optimizer", scaled)
        if inner is not scaled:
            self.loss_scale = DynamicLossScale(scaled.initial_scale, scaled.dynamic_growth_steps)
            self.loss_scale.build()
        optimizer = inner if self.model is source else keras_copy.copied_optimizer(inner)
        variables = self.trainable_variables
        # Keras counts an optimizer's slots by the order in which it was built, also of variables that are frozen by
        # now.
        if inner.built:  # for variables that were frozen since
            copies = {id(theirs): mine for theirs, mine in zip(source.weights, self.model.weights, strict=True)}
            built_for = [copies[id(variable)] for variable in keras_copy.updated_by(inner) if id(variable) in copies]
            if others := {variable.path for variable in variables} - {variable.path for variable in built_for}:
                raise UsageError(
                    f"the optimizer of {type(source).__name__} was built without {min(others)}, which is trainable "
                    "now; call compile again, with a new optimizer"
                )
            variables = built_for
        self.optimizer = make_optimizer(self, variables, KerasOptimizer(optimizer, as_compiled=True))
        self._continue_from(source.optimizer)
        if inner.built:
            for mine, theirs in () if optimizer is inner else zip(optimizer.variables, inner.variables, strict=True):
                # A second call of `fit` goes on with the first one's moments.
                mine.assign(theirs)
        if optimizer is not inner:
            scaled = keras_copy.scaled_as(scaled, optimizer)
        if not scaled.built:  # the inner one is
            scaled.build(variables)
        if not (self.is_built and self.run_context.in_place):
            keras_compile.set_optimizer(self.model, scaled)

    def _continue_from(self, compiled: tf.keras.optimizers.Optimizer) -> None:
        """Continues from the state of the compiled optimizer, as a second call of `fit` does."""
        inner = getattr(compiled, "inner_optimizer", compiled)
        if inner is not compiled and compiled.built:
            self.loss_scale.copy_from(compiled)
        if inner.built:
            self.optimizer.iterations.assign(inner.iterations)
            self.optimizer.update_counts.assign(
                tf.fill([len(self.optimizer.all_variables)], tf.cast(inner.iterations, tf.int64))
            )

    @classmethod
    def updates_before(cls) -> int:
        """Returns the updates of an existing model so far, by its optimizer or, if these are more, by runs."""
        if not cls.is_built:
            return 0
        model = cls.make()
        by_runs = vars(model).get(_UPDATES, 0)
        return by_runs if model.optimizer is None else max(int(model.optimizer.iterations.numpy()), by_runs)

    def restart(self, updates_before: int) -> None:
        """Prepares for another run of the same model itself, whose compiled steps are used again."""
        assert self.run_context.updates_before is not None  # that of a model that is trained itself
        self.run_context.updates_before.assign(updates_before)
        keras_internals.seed_again(self.run_context.host_seed)
        if not self._own_steps:  # in which optimizers count for themselves
            self._continue_from(self.model.optimizer)

    @property
    def exchanges_in_own_step(self) -> bool:  # type: ignore[override]
        layers = keras.all_layers_in(self.inventory.layers.values())
        return bool(self._own_steps) and any(getattr(layer, "synchronized", False) for layer in layers)

    @property
    def compile_values(self) -> dict[str, Any]:  # type: ignore[override]
        """What `compile` has decided, by value; see `keras_compile.compile_values`."""
        return keras_compile.compile_values(type(self).make() if self.is_built else self.model)

    @property
    def compiled_variables(self) -> list[tf.keras.Variable]:  # type: ignore[override]
        """The variables of the compiled optimizer, with the present loss scale."""
        if self.inventory.loss_scale and hasattr(self.model.optimizer, "dynamic_scale"):
            self.inventory.loss_scale.copy_to(self.model.optimizer)
        return [] if self.model.optimizer is None else self.model.optimizer.variables

    def hand_over(self, trained: tf.keras.Model, updates: int) -> None:
        """Copies weights and optimizer state to the model that exists, if a copy of it was trained.

        Args:
          trained: the run's model, with the weights that evaluations use.
          updates: the number of the model's updates so far.
        """
        model = self.make()
        vars(model)[_UPDATES] = max(updates, vars(model).get(_UPDATES, 0))
        if trained is model:
            return
        for theirs, mine in zip(model.weights, trained.weights, strict=True):
            theirs.assign(mine)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        for theirs, mine in zip(model.optimizer.variables, self.compiled_variables, strict=True):
            theirs.assign(mine)

    @property
    def unreset(self) -> list[str]:
        """The names of metrics whose `reset_state` does nothing: callbacks get their values over the run."""
        if self._own_steps:
            return self._own_steps.unreset
        by_name = self._metrics.by_name if self._metrics else {}
        return [name for name, metric in by_name.items() if keras_internals.is_unreset(metric.metric)]

    def _build_losses(self) -> None:
        """Makes the losses and metrics that the model is compiled with, by a trace of both on one batch."""
        compiled = keras_compile.arguments(self.model)
        fields = form.fields(form.values(form.element_spec(self.run_context.example)))
        self._kept = keras_compile.KeptMetrics(self.model)
        is_own = keras_calls.overrides(self.model, _OWN)
        self._own_loss = keras_compile.OwnLoss(self.model, self._kept) if is_own else None
        self._losses = None if is_own else self._compiled_losses(compiled, fields.labels is not None)
        traces: list[_Trace] = []

        def trace(*batch):
            # In replicas, as steps are: layers may exchange values.
            tf.distribute.get_strategy().run(lambda *batch: traces.append(self._trace(compiled, *batch)), batch)
            return traces[-1].outputs

        def traced(size: int | None) -> tuple[Any, Any]:
            specs = tf.nest.map_structure(lambda x: x and form.batch_spec(x, size), fields)
            return specs, tf.function(trace, autograph=False).get_concrete_function(*specs).structured_outputs

        specs, outputs = keras_calls.traced_for_some_size(traced, self.run_context.replica_batch_size)
        self._num_outputs = len(tf.nest.flatten(outputs))
        sums = self._sums_of_updates(traces[-1].updates)
        if traces[-1].is_masked:  # a mask's count can't be seen in the result of `compute_loss`
            self._whole_batch_losses = [_OWN]
        else:
            self._whole_batch_losses = self._find_whole_batch_losses(specs, outputs, traces[-1].compared)
        self._metrics = None
        if (compiled["metrics"] or compiled["weighted_metrics"]) and specs.labels is not None:
            labels_and_outputs = self._weighed(specs.labels)[0], outputs
            symbols = tf.nest.map_structure(lambda x: None if x is None else keras_calls.symbol(x), labels_and_outputs)
            self._metrics = keras_compile.Metrics(self.model, *symbols)
            sums |= {
                name: KerasMetric(metric.metric, has_one_length=True) for name, metric in self._metrics.by_name.items()
            }
        self._sums = sums

    def _compiled_losses(self, compiled: Mapping[str, Any], has_labels: bool) -> keras_compile.Losses | None:
        loss = compiled["loss"]
        if loss is None:
            return None
        if not has_labels:
            raise UsageError("the model is compiled with a loss, and the data has no labels; pass them as y")
        if isinstance(loss, dict):  # Keras asks for labels of an output whose loss is None
            loss = {name: value for name, value in loss.items() if value is not None}
        return keras_compile.Losses(
            loss, compiled["loss_weights"], output_names=getattr(self.model, "output_names", None)
        )

    def _trace(self, compiled: Mapping[str, Any], features, labels, example_weights) -> _Trace:
        """Calls the model and its losses on a batch, in a graph."""
        zero = tf.constant(0, tf.int64)  # the step's number, and the batch's: layers may sample
        with self._kept.noted() as updates, StepContext(step=zero, replica=tf.constant(0), batch_number=zero):
            if self._kept.kept:
                self.forward(features, training=False)
            outputs = self.forward(features, training=True)  # which may be more, and losses are of these in Keras
        labels, weights = self._weighed(labels)
        if self._own_loss is None or compiled["metrics"] or compiled["weighted_metrics"]:
            _check_names(compiled, labels, outputs, getattr(self.model, "output_names", None) or ())
        is_masked = False
        if self._own_loss is not None:
            weights = example_weights if weights is None else weights
            updates |= self._own_loss(features, labels, outputs, weights, True)[1]
            is_masked = any(keras_compile.get_mask(x) is not None for x in tf.nest.flatten(outputs))
        elif self._losses is not None:
            self._check_losses(self._losses, labels, outputs, weights)
        elif not self.model.losses:
            raise UsageError(
                f"{type(self.model).__name__} is compiled without a loss, and its layers add none; call "
                "model.compile(optimizer=..., loss=...)"
            )
        compared = graphs.compared_with([x for x in tf.nest.flatten(labels, True) if x is not None])
        return _Trace(outputs, updates, is_masked, compared)

    def _check_losses(self, losses: keras_compile.Losses, labels, outputs, weights) -> None:
        """Computes the losses, so that Keras finds mistakes here, not in a step."""
        try:
            losses.total(labels, outputs, None, lambda whole: whole.total)
        except (KeyError, TypeError, ValueError) as error:
            if all(x is not None for x in tf.nest.flatten(labels)):
                raise
            raise UsageError(
                f"{type(self.model).__name__}: y is None for an output that has a loss ({reason(error)}); give its "
                "labels, or compile with None as its loss"
            ) from error
        if weights is not None:
            losses.total(labels, outputs, weights, lambda whole: whole.total)

    def _sums_of_updates(self, updates: dict[str, list[tuple]]) -> dict[str, KerasMetric]:
        """Returns the metrics that layers and `compute_loss` update with values by example, as sums.

        Raises:
          UsageError: they do not update a metric, or with a number that can't be divided among replicas.
        """
        sums: dict[str, KerasMetric] = {}
        if missing := self._kept.kept - updates.keys():
            raise UsageError(_NOT_UPDATED.format(type(self.model).__name__, min(missing)))
        for name, update in updates.items():
            metric, is_scalar = self._kept.metrics[name], [not all(x.shape.rank for x in given) for given in update]
            is_weighed = name in self._kept.kept and len(update[0]) > 1
            if not any(is_scalar):
                sums[name] = KerasMetric(metric, has_one_length=True)
            elif not all(is_scalar) or not keras_compile.is_mean(metric) or is_weighed:
                raise UsageError(
                    f"{type(self.model).__name__} updates {name}, which is not a Mean, with one number of the batch; "
                    "pass it an entry per example"
                )
        return sums

    def _find_whole_batch_losses(self, specs, outputs, compared) -> list[str]:
        """Returns the names of losses that are not means over examples."""
        features, labels, example_weights = specs
        labels, weights = self._weighed(labels)
        own_sums = self._own_loss and functools.partial(_own_sums, self._own_loss)
        replicas, steps = tf.distribute.get_strategy().num_replicas_in_sync, self.run_context.options.accumulate_steps
        sums = own_sums or (self._losses and functools.partial(_loss_sums, self._losses))
        if (replicas == 1 and steps == 1) or not sums:
            return []
        keras_losses = self._losses.keras_losses if self._losses else ()
        try:
            batch = (features, labels, outputs, example_weights if weights is None else weights)
            is_keras = own_sums is None and all(map(keras_compile.is_of_keras, keras_losses))
            found = trials.in_a_thread(lambda: trials.find_not_additive(sums, batch, None if is_keras else compared))
        except Exception as error:  # of any class
            logging.info(
                "the loss can't be computed on random numbers (%s): it is computed of whole batches", reason(error)
            )
            return [_OWN] if own_sums else [loss.name for loss in keras_losses]
        if not found.undecided:
            return found.not_additive
        gathers = steps == 1 and not current_mesh().is_sharded
        logging.info(
            "%s has on random numbers one value, or none, whatever the model computes, so it may or may not be a mean "
            "over examples: it is %s",
            *(found.undecided[0], "computed of whole batches" if gathers else "taken for one"),
        )
        return [*found.not_additive, *found.undecided] if gathers else found.not_additive

    def eval_step(self, batch):
        if keras_calls.overrides(self.model, "evaluate"):
            raise UsageError(
                f"{type(self.model).__name__} overrides evaluate, which no run calls; override test_step, or leave "
                "validation out, and call the model's evaluate, as in a callback"
            )
        metrics: Any = self._own_steps.test(batch) if self._own_steps else super().eval_step(batch)
        if isinstance(metrics, tuple):  # with predictions
            return self._by_first_names(metrics[0]), metrics[1]
        return self._by_first_names(metrics)

    def train_step(self, batch) -> dict[str, Any]:
        metrics: dict[str, Any]
        if self._own_steps:
            metrics = self._own_steps.train(batch)
        elif self.trainable_variables:
            metrics = super().train_step(batch)
        else:  # as in Keras, there is no update without weights to train
            with keras_scopes.computing_with(step_context().values):
                metrics = self._forward_losses(batch, training=True).metrics()
            metrics["gradient_norm"] = Mean(tf.zeros([]), tf.zeros([]))  # of no step: steps have the same metrics
        return self._by_first_names(metrics)

    def _by_first_names(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Names metrics as when the run began: Keras numbers layers and metrics without a name through a process."""
        parts = [*keras.layers_in(self.model), *keras_compile.all_metrics(self.model)]
        now: dict[str, list[str]] = {}
        for name in metrics:
            now.setdefault(keras_internals.unnumbered(name, parts), []).append(name)
        if step_context().is_training and not self.first_names:
            self.__dict__["first_names"] = now
        names = {name: name for name in metrics}
        for unnumbered, several in now.items():
            if len(first := self.first_names.get(unnumbered, ())) == len(several):
                names |= dict(zip(several, first, strict=True))
        return {names[name]: pair for name, pair in metrics.items()}

    def _unwrap_padded(self, padded: form.Padded) -> Any:
        # As Keras's `fit` passes what `padded_batch` made, and ragged tensors.
        return padded.tensor if isinstance(padded, form.Ragged) else padded.values

    def _model_losses(self, outputs, batch) -> dict[str, Any] | None:
        if self._own_loss is None:
            return None
        _, labels, weights, _, counted = batches.unpack(form.map_padded(self._unwrap_padded, batch))
        with diagnosis.labels_as_numbers(labels, self):
            owner = f"{type(self).__name__}.{_OWN}"
            # Called once per step, with the weights: layers that it calls may change their state.
            total, pairs = self._batch_losses(outputs, counted, weights)
        step_context().losses.append(TracedLoss(owner, outputs, counted, (total, pairs)))
        return {**pairs, "loss": Mean(total, _size(batch))}

    def loss(self, outputs, batch) -> Mean:
        batch = form.map_padded(self._unwrap_padded, batch)

        def pair(weights=None):
            total, _ = self._batch_losses(outputs, batch, weights)
            return weighed_by(Mean(total, _size(batch)), pair, weights is not None)

        return pair()

    def metrics(self, outputs, batch) -> dict[str, Mean]:
        pairs: dict[str, Any] = {}
        batch = form.map_padded(self._unwrap_padded, batch)
        several = self._losses is not None and len(self._losses.keras_losses) > 1
        for name, pair in self._batch_losses(outputs, batch, None)[1].items() if several else ():

            def weigh(weights, name=name):
                return weighed_by(self._batch_losses(outputs, batch, weights)[1][name], None, has_weights=True)

            pairs[name] = weighed_by(pair, weigh)
        labels, weights = self._weighed(form.fields(batch).labels)
        pairs |= self._confusion(labels, outputs, weights)
        if self._metrics is None:
            return pairs
        labels, predictions, weights = (self._metrics.flat(structure) for structure in (labels, outputs, weights))
        for name, metric in self._metrics.by_name.items():
            metric_weights = weights[metric.output if len(weights) > 1 else 0] if metric.is_weighted else None
            pairs[name] = self._sum(name, metric, labels[metric.output], predictions[metric.output], metric_weights)
        return pairs

    def _confusion(self, labels, outputs, weights) -> dict[str, Pair]:
        """Returns the confusion matrix of the loss's examples, if it is a cross-entropy over few classes."""
        classified = self._losses and self._losses.classified(labels, outputs, weights)
        if not classified or classified.predictions.shape[-1] > FEW_CLASSES:
            return {}
        pair = confusion_matrix(*classified)
        if weights is None:  # those of whole examples may follow
            weighed_by(pair, lambda examples: self._confusion(labels, outputs, examples)["confusion"])
        return {"confusion": pair}

    def _weighed(self, labels) -> tuple[Any, Any]:
        """Splits the data's labels into (labels, weights), of which those that outputs lack, or all, are None."""
        labels, weights = labels if isinstance(labels, form.WeighedLabels) else (labels, None)
        return form.with_none(labels), weights

    def _sum(self, name: str, metric: keras_compile.Metric, labels, predictions, weights=None) -> Pair:
        """Computes one output's contribution to a metric for a batch; only `weighted_metrics` use weights."""
        weighed = () if weights is None else (keras_compile.beside_mask(weights, predictions),)
        weigh = functools.partial(self._sum, name, metric, labels, predictions) if metric.is_weighted else None
        return weighed_by(self._sums[name](labels, predictions, *weighed), weigh, weights is not None)

    def _batch_losses(self, outputs, batch, weights) -> tuple[tf.Tensor, dict[str, Pair]]:
        """Returns the loss, times the examples of this replica's local batch, and a pair of each output's.

        The sum across replicas, divided by all examples, is then Keras's of the global batch.
        """
        if self._losses is None and self._own_loss is None:
            return tf.constant(0.0), {}
        if self._losses and (number := len(tf.nest.flatten(outputs))) != self._num_outputs:
            raise UsageError(
                f"{type(self.model).__name__} has {counted(number, 'output')} in evaluation, and {self._num_outputs} "
                "in training, of which its losses are; return the same, or leave evaluations out"
            )
        size, fields, steps = _size(batch), form.fields(batch), self.run_context.options.accumulate_steps
        features, (labels, example_weights), fraction = fields.features, self._weighed(fields.labels), None
        weights = example_weights if weights is None else weights
        if self._whole_batch_losses:
            if step_context().is_training and steps > 1:
                raise UsageError(
                    f"accumulate_steps: {self._whole_batch_losses[0]} is a loss of a batch as a whole, not a mean over "
                    "its examples, so it can't be computed of a micro-batch; use 1"
                )
            features = features if self._own_loss else None
            # Such a loss, say of a correlation, is not a sum over examples: each replica computes it of all replicas'
            # examples, and counts the fraction of it that its own examples are.
            features, outputs, labels, weights = self._gathered((features, outputs, labels, weights))
            fraction = size / _size(outputs)
        if self._own_loss:
            with _of_any_size(self._whole_batch_losses):
                loss, updates = self._own_loss(features, labels, outputs, weights, step_context().is_training)
            return size * loss, {name: self._updated(name, update, size, fraction) for name, update in updates.items()}

        def divided(loss: keras_compile.OutputLoss) -> tf.Tensor:
            if self._whole_batch_losses:  # the same on each replica
                return size * (loss.total if loss.count is None else tf.math.divide_no_nan(loss.total, loss.count))
            examples, count = size, loss.count
            if not loss.is_even:
                if step_context().is_training and steps > 1:
                    raise UsageError(
                        "accumulate_steps: a loss with a mask, or with a reduction of its own, is divided by a count "
                        "over the whole batch, which can't be known for a micro-batch; use 1"
                    )
                # A mask leaves replicas unequal counts; Keras divides by that of the global batch.
                examples, count = tf.unstack(
                    self.reduction.sum_statistics(tf.stack([size, 0.0 if count is None else count]))
                )
            return loss.total * (examples if loss.count is None else tf.math.divide_no_nan(examples, count))

        assert self._losses  # else the model has a loss of its own, or losses of its layers alone
        with _of_any_size(self._whole_batch_losses):
            total, by_name = self._losses.total(labels, outputs, weights, divided)
        return total, {name: Mean(output_total, size) for name, output_total in by_name.items()}

    def _updated(self, name: str, updates: list[tuple], size: tf.Tensor, fraction: tf.Tensor | None = None) -> Pair:
        """Computes a batch's contribution to a metric that layers or `compute_loss` update.

        Args:
          updates: the arguments of each; one number is a mean over the batch's examples.
          size: the examples of this replica.
          fraction: this replica's fraction of the global batch's examples, if the arguments are of the global batch.
        """
        if name in self._sums:
            with self._kept.made():
                pairs: list[Pair] = [self._sums[name](*arguments) for arguments in updates]
        else:
            pairs = [Mean(tf.cast(arguments[0], tf.float32) * size, size) for arguments in updates]
        total, count = (tf.add_n(parts) for parts in zip(*pairs, strict=True))
        whole = type(pairs[0])(total if fraction is None or name not in self._sums else total * fraction, count)
        return weighed_by(whole, None, has_weights=True)  # in the arguments, if the model takes any

    def _forward_losses(self, batch, training: bool) -> BatchLosses:
        with self._kept.noted() as updates:
            losses = super()._forward_losses(batch, training)

        def metrics() -> dict[str, Pair]:
            kept = {name: self._updated(name, update, _size(batch)) for name, update in updates.items()}
            return {**kept, **losses.metrics()}

        return losses._replace(metrics=metrics)

    def _with_penalties(self, loss: Mean | SumOfMeans, batch) -> Mean | SumOfMeans | None:
        whole = super()._with_penalties(loss, batch)
        return None if self._own_loss else whole  # it has added what layers add, or left it out

    def _check_sums(self) -> None:
        super()._check_sums()
        if self._own_loss and not self.reduction.alone():
            raise UsageError(
                f"{type(self.model).__name__} has its own compute_loss, and a layer adds an array to the loss "
                "(add_loss), of which each replica has a part; add its mean, or use one device"
            )

    def _gathered(self, nest):
        """Gathers a nest of tensors [examples, ...] from all replicas, outputs with their masks."""
        flat = tf.nest.flatten(nest)
        masks = [None if x is None else keras_compile.get_mask(x) for x in flat]
        present = [x for x in (*flat, *masks) if x is not None]
        gathered = iter(gather_together(self, present))
        flat = [None if x is None else next(gathered) for x in flat]
        for x, mask in zip(flat, masks, strict=True):
            if mask is not None:
                keras_compile.set_mask(x, next(gathered))
        return tf.nest.pack_sequence_as(nest, flat)


def _loss_sums(losses: keras_compile.Losses, batch) -> dict[str, tuple]:
    """Computes (a sum, its count) of each output's loss."""
    wholes: list[keras_compile.OutputLoss] = []

    def note(whole: keras_compile.OutputLoss) -> tf.Tensor:
        wholes.append(whole)
        return whole.total

    _, labels, outputs, _ = batch
    losses.total(labels, outputs, None, note)
    examples = float(_size(outputs))
    by_name: dict[str, tuple] = {}
    for loss, output_loss in zip(losses.keras_losses, wholes, strict=True):
        by_name[loss.name] = (*by_name.get(loss.name, ()), *output_loss.to_pair(examples))
    return by_name


def _own_sums(own_loss: keras_compile.OwnLoss, batch) -> dict[str, tuple]:
    """Computes the sums of a model's own loss, and of the numbers with which it updates metrics."""
    features, labels, outputs, weights = batch
    with keras_scopes.without_assignments():
        loss, updates = own_loss(features, labels, outputs, weights, True)
    numbers = [tf.cast(x, tf.float32) for update in updates.values() for x, *_ in update if x.shape.rank == 0]
    return {_OWN: tuple(float(_size(outputs)) * number for number in (loss, *numbers))}


def _check_names(compiled: Mapping[str, Any], labels: Any, outputs: Any, output_names: Iterable[str]) -> None:
    """Raises `UsageError` unless labels by name fit the outputs with a loss or a metric.

    Keras compares an output without labels of its name with those of another one.
    """
    if not isinstance(labels, dict) or not isinstance(outputs, dict):
        return
    loss = compiled["loss"] if isinstance(compiled["loss"], dict) else dict.fromkeys(outputs, compiled["loss"])
    has_metrics = compiled["metrics"] or compiled["weighted_metrics"]  # for some outputs: Keras asks for all labels
    compared = {name for name in outputs if has_metrics or loss.get(name) is not None}
    missing, unknown = compared - labels.keys(), labels.keys() - outputs.keys() - {*output_names}
    if missing or unknown:
        has = f"y has labels for {', '.join(map(repr, labels))}"
        if unknown:
            raise UsageError(f"{has}, and the model's outputs are {', '.join(map(repr, outputs))}; use these names")
        name = min(missing)
        raise UsageError(
            f"{has}, and the model is compiled with a loss for its output {name!r}, or with metrics; add y[{name!r}], "
            "or compile with losses of the other outputs alone, by their names"
        )


@contextlib.contextmanager
def _by_configuration(model: tf.keras.Model) -> Iterator[None]:
    """Converts errors of Keras or `keras_copy` in this context: a model can't be copied. Adds the cure."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        methods = (
            "get_config",
            *(("get_compile_config", "compile_from_config") * keras_calls.overrides(model, "compile")),
        )
        raise UsageError(
            f"Keras can't recreate {type(model).__name__} from its configuration ({reason(error)[:120]}); implement "
            f"{', '.join(methods)}, or pass a function that returns the compiled model"
        ) from error


@contextlib.contextmanager
def _of_any_size(losses: Sequence[str]) -> Iterator[None]:
    """Converts errors of losses that are computed of all replicas' examples, whose number no trace knows."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not losses or isinstance(error, UsageError) or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            raise
        raise UsageError(
            f"{losses[0]} is computed of all replicas' examples, whose number is not known as a step is traced "
            f"({reason(error)}); give squeeze its axis, take sizes by keras.ops.shape, or use one device"
        ) from error


def _size(batch) -> tf.Tensor:
    """Returns the number of examples of a batch, scalar float32."""
    first = next(x for x in tf.nest.flatten(batch) if x is not None)  # of outputs, some may be None
    return tf.cast(tf.shape(first)[0], tf.float32)
