"""A compiled model's own `train_step` and `test_step`, run as they are, on any number of replicas.

In the step each replica sees its local batch as if it were alone. Replicas meet where the model calls `apply` of
one of its optimizers: the engine sums the gradients, each replica's weighted by its examples, and makes the update.
Metrics are not updated there, since each replica would update its own: the arguments are noted, and the sums that the
metrics add up for them are merged as any others.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine import logging
from ...engine.data import form
from ...engine.errors import UsageError, reason
from ...engine.internals import graphs, keras, keras_calls, keras_scopes
from ...engine.internals.patches import undivided_losses
from ...engine.internals.tensorflow import variables_outside_function, weighing_losses
from ...engine.internals.variables import tf_variable
from ...engine.metrics.means import weighed_by
from ...engine.metrics.pairs import KerasSums, Mean, Pair
from ...engine.optimizers import KerasOptimizer
from ...engine.optimizers.loss_scale import DynamicLossScale
from ...engine.step.batches import num_examples, zero_unless
from ...engine.step.context import StepContext, step_context
from ...engine.step.gradients import Gradients, Update
from ...engine.step.options import CLIPS, StepOptions
from . import keras_compile, keras_internals
from .keras_metrics import KerasMetric, joined_kind

# The methods of which a model overrides at least one that has steps of its own.
METHODS = ("train_step", "test_step", "compute_metrics")
# Ops that leave a metric's result as it is.
_PASSED_ON = ("Cast", "EnsureShape", "Identity", "Reshape", "Squeeze", "StopGradient")
# What `apply` of an optimizer does in the step that is traced in this thread.
_apply: contextvars.ContextVar[Callable[..., None]] = contextvars.ContextVar("apply")


class _Applied(NamedTuple):
    """An optimizer of the model, as the engine applies it.

    Attributes:
      options: the run's options with the optimizer's own clipping.
      loss_scale: the scale of a `LossScaleOptimizer`, in its own variables; None for others.
    """

    optimizer: KerasOptimizer
    options: StepOptions
    loss_scale: DynamicLossScale | None


@dataclasses.dataclass
class _Step:
    """A step that is traced on this replica.

    Attributes:
      examples: the examples of this replica's local batch, scalar float32.
      sizes: its arrays' numbers of examples, which may differ, as far as they are known; None is unknown.
      fraction: this replica's fraction of the global batch's examples, scalar float32; None until a metric needs it.
      has_summed: whether replicas have met, with which moving statistics are averaged.
      ended: the metrics of each `Update.end`.
    """

    examples: tf.Tensor
    sizes: Sequence[int | None]
    fraction: tf.Tensor | None = None
    has_summed: bool = False
    ended: list[dict[str, Mean]] = dataclasses.field(default_factory=list)


class _Result(NamedTuple):
    """What a step returns of metrics alone: the metrics, and the kind of pairs of their joined states."""

    metrics: Sequence[tf.keras.metrics.Metric]
    kind: type[KerasSums]


class OwnSteps:
    """Runs a model's own `train_step` and `test_step`, and Keras's where it overrides one alone.

    Args:
      trainer: the model's trainer, whose attribute `model` is set.
      to_data: converts a batch to what Keras's `fit` passes to a step.

    Attributes:
      optimizers: the engine's optimizers, by the path of the attribute that has Keras's; set by `build`.
      loss_scales: the loss scales of those that are within a `LossScaleOptimizer`.
    """

    def __init__(self, trainer: Any, to_data: Callable[[Any], Any]):
        self._trainer, self._model, self._to_data = trainer, trainer.model, to_data
        self._found = keras_internals.optimizers_in(self._model)
        self._applies = keras_internals.TakenOver(
            {"apply": lambda one, *given, **named: _apply.get()(one, *given, **named)}
        )
        for optimizer in self._found.values():
            self._applies.add(optimizer)
        self._applied: dict[int, _Applied] = {}
        self._metrics = keras_compile.NotedMetrics()
        self._sums: dict[tf.keras.metrics.Metric, KerasMetric] = {}
        self._results: dict[str, dict[str, _Result]] = {}  # by method, as it was traced last, and name
        self.optimizers: dict[str, KerasOptimizer] = {}
        self.loss_scales: dict[str, DynamicLossScale] = {}

    def build(self, adopt: Callable[[tf.keras.optimizers.Optimizer, Sequence], KerasOptimizer]) -> None:
        """Makes the variables of the model, its optimizers and its metrics, as a trace of its steps does in Keras.

        Args:
          adopt: makes the engine's optimizer of the model's, for the variables that it is applied to.

        Raises:
          UsageError: the steps can't be traced.
        """
        options = self._trainer.run_context.options
        if options.accumulate_steps > 1:
            raise UsageError(
                f"accumulate_steps={options.accumulate_steps}: {self._name}.train_step computes the gradients of its "
                "whole batch itself; leave it out, or accumulate gradients in the step"
            )
        # Keras's `fit` builds an optimizer at its first `apply`, for that call's variables, which the step alone names.
        updated: dict[int, dict[int, Any]] = {}

        def note(optimizer, gradients, trainable_variables=None):
            if trainable_variables is None and not optimizer.built:
                raise UsageError(f"{self._name} calls apply of {optimizer.name} without variables; pass them")
            variables = updated.setdefault(id(optimizer), {})
            variables.update((id(variable), variable) for variable in trainable_variables or ())

        self._trace("train_step", note)
        is_built = all(layer.built for layer in keras.layers_in(self._model, itself=False))
        if keras_calls.overrides(self._model, "test_step") or (keras_calls.has_call(self._model) and not is_built):
            # Without evaluation data it is not called, and may take data of another form than the training data.
            is_unused = is_built and self._trainer.run_context.evaluation is None
            with contextlib.suppress(*[Exception] * is_unused):
                self._trace("test_step", note)
        for path, optimizer in self._found.items():
            if id(optimizer) in updated:
                self._adopt(path, optimizer, [*updated[id(optimizer)].values()], adopt)
        for metric in keras_compile.all_metrics(self._model):
            self._metrics.note([metric])
            self._sums[metric] = KerasMetric(metric, has_one_length=True)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    @property
    def unreset(self) -> list[str]:
        """The names of metrics whose `reset_state` does nothing."""
        return [metric.name for metric in self._sums if keras_internals.is_unreset(metric)]

    def _trace(self, method: str, apply: Callable[..., None]) -> None:
        """Traces a step on each replica, and forgets the trace."""
        context = self._trainer.run_context
        example, size = context.example, context.replica_batch_size
        if method == "test_step" and context.evaluation is not None:
            example, size = context.evaluation
        specs = form.values(form.element_spec(example))
        strategy, zero = tf.distribute.get_strategy(), tf.constant(0, tf.int64)

        def step(*batch) -> None:
            batch = batch if isinstance(specs, tuple) else batch[0]
            context = StepContext(step=zero, replica=tf.constant(0))
            with context, undivided_losses(), keras_scopes.unseeded_samples(context.keras_seed):
                self._call(method, batch, apply)

        def trace(*batch) -> None:
            with variables_outside_function():
                strategy.run(step, batch)

        def traced(size: int | None) -> tf.types.experimental.ConcreteFunction:
            arguments = tf.nest.map_structure(lambda spec: spec and form.batch_spec(spec, size), specs)
            arguments = arguments if isinstance(specs, tuple) else (arguments,)
            return tf.function(trace, autograph=False).get_concrete_function(*arguments)

        traced_step = keras_calls.traced_for_some_size(traced, size)
        if method == "train_step" and strategy.num_replicas_in_sync > 1:
            self._warn_of_local_batches(traced_step.graph)

    def _warn_of_local_batches(self, graph: tf.Graph) -> None:
        """Warns if the step relates a batch's examples to each other: it gets those of a local batch alone."""
        has_pairs = any(map(_compares_examples, graphs.operations(graph)))
        causes = ["products of examples with examples"] if has_pairs else []
        layers = (x for x in keras.layers_in(self._model) if isinstance(x, tf.keras.layers.BatchNormalization))
        causes += ["batch normalization"] if any(not (x.synchronized or not x.trainable) for x in layers) else []
        if causes:
            logging.warning(
                "%s.train_step has %s, which on several replicas is of a replica's share of the batch",
                self._name,
                " and ".join(causes),
            )

    def _adopt(self, path: str, optimizer, variables: Sequence, adopt) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if steps := inner.gradient_accumulation_steps:
            raise UsageError(
                f"{self._name}: {optimizer.name} has gradient_accumulation_steps={steps}, and each apply of a step is "
                "an update; leave it out, or accumulate gradients in the step"
            )
        options, scale = self._trainer.run_context.options, None
        clips = zip(CLIPS, (inner.global_clipnorm, inner.clipnorm, inner.clipvalue), strict=True)
        options = dataclasses.replace(options, **{name: value for name, value in clips if value})
        engines = adopt(optimizer, variables)
        if inner is not optimizer:
            options = dataclasses.replace(options, precision="float16")
            scale = DynamicLossScale(optimizer.initial_scale, optimizer.dynamic_growth_steps)
            scale.value, scale.good_steps = optimizer.dynamic_scale.value, optimizer.step_counter.value
            self.loss_scales[path] = scale
        self.optimizers[path] = engines
        self._applied[id(optimizer)] = _Applied(engines, options, scale)

    def train(self, batch) -> dict[str, Pair]:
        """Runs `train_step` on this replica's local batch. Replica code."""
        step = _step(batch)
        # What it computes of other replicas' examples, such as their moments, is part of their losses, too.
        with weighing_losses(step.examples):
            pairs = self._pairs("train_step", batch, step, functools.partial(self._update, step))
        if not step.ended:
            return pairs
        # Of several updates in a step one norm is shown, as of all their gradients together.
        norms = [ended["gradient_norm"] for ended in step.ended]
        norm = norms[0] if len(norms) == 1 else Mean(tf.linalg.norm([one.total for one in norms]), norms[0].count)
        skips = [ended["skipped"].total for ended in step.ended if "skipped" in ended]
        if not skips:
            return {**pairs, "gradient_norm": norm}
        skipped = tf.reduce_max(tf.stack(skips))
        if self._trainer.run_context.options.may_skip:
            pairs = zero_unless(skipped == 0, pairs)
        return {**pairs, "gradient_norm": norm, "skipped": Mean(skipped, tf.constant(1.0))}

    def test(self, batch) -> dict[str, Pair]:
        """Runs `test_step` on this replica's local batch. Replica code."""

        def refuse(optimizer, *_, **__):
            raise UsageError(f"{self._name}.test_step applies {optimizer.name}; train in train_step")

        return self._pairs("test_step", batch, _step(batch), refuse)

    def _call(self, method: str, batch, apply: Callable[..., None]) -> Any:
        """Calls a step of the model with what Keras's `fit` passes, and `apply` for that of its optimizers."""
        step = getattr(self._model, method)
        # Without tf.function, if it decorates the step: the engine compiles steps, and replicas can't meet in others.
        step = getattr(step, "python_function", step)
        token = _apply.set(apply)
        # Around servers other workers move, meanwhile, what the step assigns itself; what it applies an optimizer to it
        # reads where it is.
        trained = {id(v) for applied in self._applied.values() for v in applied.optimizer.all_variables}
        values = step_context().values if step_context().is_training else []
        values = [(variable, value) for variable, value in values if id(tf_variable(variable)) not in trained]
        try:
            with self._applies, keras_scopes.computing_with(values):
                returned = step(self._to_data(batch))
        except (AttributeError, NotImplementedError, TypeError) as error:
            if "does not have a `call()`" in str(error):
                cure = f"define {method}, or leave evaluations out"
            elif any(word in str(error) for word in ("numpy", "ymbolic")):
                cure = "compute with functions of tensors, TensorFlow's or keras.ops's"
            else:
                raise
            raise UsageError(f"{self._name}.{method} can't be compiled: {reason(error)}; {cure}") from error
        finally:
            _apply.reset(token)
        return returned

    def _update(self, step: _Step, optimizer, gradients, trainable_variables=None) -> None:
        """Makes an update across replicas, in place of `apply` of one of the model's optimizers. Replica code."""
        reduction, applied = self._trainer.reduction, self._applied.get(id(optimizer))
        if applied is None:
            raise UsageError(
                f"{self._name}.train_step applies {optimizer.name} only in a later trace; apply it in each"
            )
        variables = applied.optimizer.trainable if trainable_variables is None else [*trainable_variables]
        gradients, is_inside = [*gradients], tf.compat.v1.get_default_graph() is not step_context().graph
        if all(gradient is None for gradient in gradients):
            raise UsageError(
                f"{self._name}.train_step applies {optimizer.name} without a gradient; compute the loss from the "
                "weights within the tape"
            )
        if not reduction.alone():
            if is_inside:
                raise UsageError(
                    f"{self._name}.train_step applies {optimizer.name} within tf.cond, a loop or a tf.function, where "
                    "replicas can't meet; apply gradients at each step, zeros where there are none, or use one device"
                )
            # Moving statistics are averaged where replicas meet first; another average of equal values costs a message.
            averages, step.has_summed = () if step.has_summed else None, True
            local = Gradients(gradients, (step.examples,))
            gradients, examples = reduction.sum(local, step.examples, averages, variables)
            gradients = gradients.over(examples)
        else:
            step_context().applied.mark("Reduction.sum")
            gradients = Gradients(gradients)
        if applied.loss_scale is not None:
            gradients = gradients.times(1.0 / tf.convert_to_tensor(applied.loss_scale.value))
        update = Update(self._trainer, gradients, variables, applied.options, applied.loss_scale)
        update.apply(applied.optimizer, variables)
        ended = update.end({})
        step.ended += [] if is_inside else [ended]

    def _pairs(self, method: str, batch, step: _Step, apply: Callable[..., None]) -> dict[str, Pair]:
        """Calls a step; what it returns becomes pairs that add up over replicas and batches."""
        is_step = keras_calls.overrides(self._model, method) or not keras_calls.overrides(
            self._model, "compute_metrics"
        )
        owner = f"{self._name}.{method if is_step else 'compute_metrics'}"
        with self._metrics.noting() as notes:
            returned = self._call(method, batch, apply)
        if not isinstance(returned, Mapping):
            raise UsageError(
                f"{owner} returned a {type(returned).__name__}; return numbers by name, such as metrics' results"
            )
        states = {metric: self._state(metric, updates, step) for metric, updates in notes.updates.items()}
        values = _flat(returned)
        if not tf.executing_eagerly():  # a step that is executed op by op was traced before
            self._results[method] = self._find_results(values, notes.results, owner)
        pairs: dict[str, Pair] = {}
        for name, value in values.items():
            if result := self._results[method].get(name):
                parts = [states.get(metric) or self._sums[metric].nothing() for metric in result.metrics]
                pairs[name] = result.kind(*(tf.concat(part, 0) for part in zip(*parts, strict=True)))
            else:
                pairs[name] = Mean(_number(value, f"{owner}: {name!r}") * step.examples, step.examples)
        return {name: weighed_by(pair, None, has_weights=True) for name, pair in pairs.items()}

    def _find_results(self, values: Mapping[str, Any], noted: Sequence[tuple], owner: str) -> dict[str, _Result]:
        """Finds which of the values that a step returns are metrics' results, or computed from these alone."""
        results, computed = {}, list[tf.Tensor]()
        variables = [(metric, number) for metric in self._sums for number in range(len(metric.variables))]
        handles = [tf_variable(metric.variables[number]).handle for metric, number in variables]
        for name, value in values.items():
            if found := _find_result(value, noted):
                _, metric, key = found
                results[name] = _Result([metric], self._sums[metric].kind(functools.partial(_at, key)))
                continue
            number = _number(value, f"{owner}: {name!r}")
            try:
                computation = graphs.computation(number, handles)
            except UsageError as error:
                names = ", ".join(sorted({metric.name for _, metric, _ in noted}))
                raise UsageError(
                    f"{owner}: {name!r} is computed from results of metrics ({names}), which are those of an epoch, "
                    f"and from the batch, another variable or a tf.function ({error}); compute it from metrics' "
                    "results alone"
                ) from error
            if computation:
                used = [variables[number] for number in computation.variables]
                metrics = [*dict.fromkeys(metric for metric, _ in used)]
                joined = [(metric, number) for metric in metrics for number in range(len(metric.variables))]
                places = [joined.index(one) for one in used]
                results[name] = _Result(metrics, joined_kind(metrics, functools.partial(_from, computation, places)))
                computed += computation.outputs
        # Around servers what is read of a metric's variables is one value for all of its results.
        results_alone = [graphs.computation(tensor, handles) for tensor, *_ in noted] if computed else []
        ways = [each.outputs for each in results_alone if each]
        on_the_way = {output.op.name for way in (computed, *ways) for output in way}
        for tensor in [*(tensor for tensor, *_ in noted), *computed]:
            others = {op.type for op in tensor.consumers() if op.name not in on_the_way}
            if used_by := others.difference(_PASSED_ON):
                raise UsageError(
                    f"{owner} computes with the result of a metric ({min(used_by)}), which is that of an epoch and "
                    "known between calls; keep what the step needs in a variable of the model"
                )
        return results

    def _state(self, metric, updates: Sequence[tuple], step: _Step) -> KerasSums:
        """Adds up what the updates of a metric with a batch, or with this replica's local batch, contribute."""
        states = []
        for arguments in updates:
            state = self._sums[metric].update(*arguments)
            if not self._trainer.reduction.alone() and not _counts_examples(arguments, metric, step):
                # A number of the batch counts once, however many replicas there are.
                if step.fraction is None:
                    step.fraction = step.examples / self._trainer.reduction.sum_counts(step.examples)
                state = type(state)(state.total * step.fraction, state.count)
            states.append(state)
        return type(states[0])(*(tf.add_n(parts) for parts in zip(*states, strict=True)))


def _step(batch: Any) -> _Step:
    return _Step(num_examples(batch), [None, *(x.shape[0] for x in tf.nest.flatten(batch))])


def _number(value, owner: str) -> tf.Tensor:
    """Converts a value that a step returns to a scalar float32."""
    try:
        number = tf.cast(tf.convert_to_tensor(value), tf.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{owner} is a {type(value).__name__}; return a number") from error
    if number.shape.rank != 0:
        raise UsageError(f"{owner} has the shape {number.shape}; return one number, such as its mean")
    return number


def _compares_examples(op: tf.Operation) -> bool:
    """Returns whether an op multiplies examples with examples, in a graph of batches of any size."""
    if op.type == "Einsum":
        equation = op.get_attr("equation").decode()
        *inputs, output = (set(re.findall(r"\.\.\.|\w", axes)) for axes in re.split(",|->", equation))
        is_product = not any(output <= axes for axes in inputs)
    else:
        is_product = op.type == "MatMul"
    # The number of examples is unknown: two unknown axes are a row and a column for each.
    return is_product and op.outputs[0].shape.rank == 2 and op.outputs[0].shape.as_list() == [None, None]


def _from(computation: graphs.Computation, places: Sequence[int], *state: tf.Tensor) -> tf.Tensor:
    """Computes a value from some of the variables of a state."""
    return computation.compute(*(state[place] for place in places))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values in a dictionary and those in it, by their own names, as Keras's logs have them."""
    return {
        name: value
        for key, entry in values.items()
        for name, value in (_flat(entry) if isinstance(entry, Mapping) else {key: entry}).items()
    }


def _at(key: Any, value: Any) -> Any:
    """Returns a result's part under a key, if it has parts; None of a result that has no value."""
    return value if key is None else value and value[key]


def _find_result(value, results: Sequence[tuple]) -> tuple | None:
    """Returns the note of the metric's result that a step returns, possibly in another dtype."""
    while tf.is_tensor(value) and tf.is_symbolic_tensor(value):
        for noted in results:
            if noted[0] is value:
                return noted
        if value.op.type not in _PASSED_ON:
            return None
        value = value.op.inputs[0]
    return None


def _counts_examples(arguments: Sequence[tf.Tensor], metric, step: _Step) -> bool:
    """Returns whether an update with a local batch adds up over replicas: it has a value, or a weight, by example."""
    if any(x.shape.rank is None or (x.shape.rank and x.shape[0] in step.sizes) for x in arguments):
        return True
    if not keras_compile.is_mean(metric) or len(arguments) < 2:
        return False
    return tf.get_static_value(arguments[1]) in step.sizes  # such as the size of the local batch
