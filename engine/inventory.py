"""Finds the models, layers, tables, optimizers and variables of a trainer, and which weights are frozen.

The steps at which the frozen weights change are known in advance. The outer loop ends a call there, and each set of
frozen weights has a compiled program of its own, in which they get no gradient: the backward pass ends where only
frozen weights are left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from .captured import Captured
from .checkpoints.slices import RowTable
from .errors import UsageError
from .internals import keras, keras_calls
from .internals.variables import VARIABLES, tf_variable, tracked, tracked_variables, variable_path
from .optimizers import Optimizer
from .optimizers.averaging import Averaged, WeightAverage
from .optimizers.loss_scale import DynamicLossScale
from .reduction import per_replica
from .reduction.aggregation import Aggregated


class Inventory:
    """The objects in a trainer's attributes, at any depth of lists, dictionaries and modules; found on first use.

    Args:
      declared: the untrained variables that declare an aggregation, by the `id` of the tf.Variable.

    Attributes:
      freezing: the weights that the run does not update, and until when; none until the trainer is prepared.
      applied_options: the run's options that each optimizer applies, by its `id`, Keras's too; set by `build.prepare`.
      captured: what traced steps have captured of the objects.
      built_flags: the `trainable_flags` as the trainer was built.
      probe: in which training steps leave what TensorBoard shows of them, if any.
    """

    def __init__(self, trainer: Any, declared: Mapping[int, Aggregated] | None = None):
        self.trainer = trainer
        self._declared = declared or {}
        self.freezing = Freezing((), ())
        self.applied_options: dict[int, set[str]] = {}
        self.probe: Any = None
        self._trainable_at_first: frozenset[int] = frozenset()
        self._variant_before: tuple | None = None  # the last of `_trainable`
        self.built_flags: list[list] = []
        self.captured = Captured(trainer, lambda: keras.all_layers_in(self.layers.values()))

    @cached_property
    def layers(self) -> dict[str, tf.keras.layers.Layer]:
        """The outermost Keras layers, including models, by path."""
        layers = tracked(self.trainer, tf.keras.layers.Layer)
        inner = {id(layer_in_it) for layer in layers.values() for layer_in_it in keras.layers_in(layer, itself=False)}
        return {path: layer for path, layer in layers.items() if id(layer) not in inner}

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The embeddings (`parts.tables`), by path."""
        return tracked(self.trainer, RowTable)

    @cached_property
    def shards(self) -> list[tf.Variable]:
        """The tables' variables."""
        return [shard for table in self.tables.values() for shard in table.variables_for_gradients]

    @cached_property
    def optimizers(self) -> dict[str, Optimizer]:
        """The engine's optimizers, by path."""
        return tracked(self.trainer, Optimizer)

    @cached_property
    def averaged(self) -> dict[str, Averaged]:
        """The models that are averages of others, by path."""
        return {path: layer for path, layer in self.layers.items() if isinstance(layer, Averaged)}

    @property
    def averages(self) -> list[WeightAverage | Averaged]:
        """All averages of weights: the optimizers', and those that are models."""
        averages = [optimizer.weight_average for optimizer in self.optimizers.values()]
        return [*(average for average in averages if average is not None), *self.averaged.values()]

    @property
    def keras_optimizers(self) -> list[tf.keras.optimizers.Optimizer]:
        """Keras's optimizers among the attributes themselves, which a step applies directly."""
        return [*tracked(self.trainer, tf.keras.optimizers.Optimizer).values()]

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """The loss scale of float16, or None."""
        return getattr(self.trainer, "loss_scale", None)

    @cached_property
    def moving_statistics(self) -> list[tf.Variable]:
        """Float variables that layers move in the forward pass, such as batch normalization's."""
        return keras.moving_statistics(self.layers.values())

    @cached_property
    def untrained(self) -> dict[int, tf.Variable]:
        """The untrained variables of layers and among the attributes themselves, by their `id`."""
        keras_variables = [v for layer in keras.all_layers_in(self.layers.values()) for v in keras.own_untrained(layer)]
        keras_variables += keras.metric_variables(self.layers.values())
        variables = [*keras_variables, *self.unlisted_variables, *self.variables]
        return {id(variable): variable for variable in map(tf_variable, variables) if not variable.trainable}

    @cached_property
    def aggregated(self) -> list[Aggregated]:
        """Variables that each replica assigns by itself, and their aggregation, as declared or the mean."""
        moving = {id(v): Aggregated(v) for v in self.moving_statistics if not per_replica.differs(v)}
        declared = {key: aggregated for key, aggregated in self._declared.items() if key in self.untrained}
        return [*(moving | declared).values()]

    @cached_property
    def per_replica_variables(self) -> list[tf.Variable]:
        """The variables whose values differ by replica: the state of stateful layers, and others."""
        states = map(tf_variable, keras.carried_states(self.layers.values()))
        return [*states, *filter(per_replica.differs, self.untrained.values())]

    @cached_property
    def undeclared(self) -> list[tf.Variable]:
        """The untrained variables without an aggregation of replicas' values."""
        means = [layer for layer in keras.all_layers_in(self.layers.values()) if keras.keeps_means(layer)]
        declared = {id(v.value) for layer in means for v in keras.own_untrained(layer)} | self._declared.keys()
        return [v for key, v in self.untrained.items() if key not in declared and not per_replica.differs(v)]

    @cached_property
    def seed_generators(self) -> list[tuple[tf.keras.random.SeedGenerator, int]]:
        """The seed generators of Keras's layers, in the order of the layers; then those that are attributes.

        Each has the number of the generator by whose state it samples: its own, or the first one's of the same seed.
        As in Keras, layers to which a user gave one seed sample alike, such as those that turn an image and its mask.
        """
        attributes = tracked(self.trainer, tf.keras.random.SeedGenerator).values()
        generators = [*keras.seed_generators(self.layers.values()), *attributes]
        distinct = {id(generator): generator for generator in generators}.values()
        first: dict[int, int] = {}
        seeds = [generator.get_config()["seed"] for generator in distinct]
        numbers = [n if seed is None else first.setdefault(seed, n) for n, seed in enumerate(seeds)]
        return [*zip(distinct, numbers, strict=True)]

    @property
    def repeats_seeds(self) -> bool:
        """Whether some of the seed generators sample alike."""
        return any(number != first for number, (_, first) in enumerate(self.seed_generators))

    @property
    def layers_without_averages(self) -> list[tf.keras.layers.Layer]:
        """The outermost layers, without models that are averages of others."""
        return [layer for path, layer in self.layers.items() if path not in self.averaged]

    @property
    def models(self) -> list[tf.keras.Model]:
        """The Keras models among `layers_without_averages`."""
        return [layer for layer in self.layers_without_averages if isinstance(layer, keras_calls.Trainable)]

    @property
    def all_weights(self) -> list:
        """All weights that a step may train: the variables of all layers, then the tables' shards."""
        variables = {id(v): v for layer in self.layers.values() for v in layer.trainable_variables}
        return [*variables.values(), *self.shards]

    @property
    def variables(self) -> list:
        """The variables among the attributes themselves, Keras's or TensorFlow's, of no layer or table."""
        found = [*tracked(self.trainer, VARIABLES).values(), *tracked_variables(self.trainer).values()]
        return [*{id(variable): variable for variable in found}.values()]

    @property
    def unlisted_variables(self) -> list:
        """The variables in attributes of layers that Keras does not list: plain ones, and those of constraints."""
        layers = keras.all_layers_in(layer for _, layer in sorted(self.layers.items()))
        listed = {id(variable) for layer in layers for variable in layer.variables}
        found = {id(variable): variable for layer in layers for variable in tracked_variables(layer).values()}
        return [variable for key, variable in found.items() if key not in listed]

    @property
    def trainable_variables(self) -> list:
        """Those of `variables` that are trainable, of float dtypes."""
        return [v for v in self.variables if v.trainable and tf.as_dtype(v.dtype).is_floating]

    @property
    def steady_variables(self) -> list[tf.keras.Variable]:
        """The layers' float variables that a forward pass does not assign: all but moving statistics."""
        return keras.steady_variables(list(self.layers.values()))

    @property
    def moved_variables(self) -> list[tf.keras.Variable]:
        """Keras's variables that a forward pass may assign: moving statistics, counts, states, metrics' totals."""
        layers = self.layers.values()
        others = [v for v in self.variables if isinstance(v, tf.keras.Variable) and not v.trainable]
        others += keras.metric_variables(layers)
        return [*keras.moved_variables(layers), *keras.carried_states(layers), *others]

    @property
    def added_to(self) -> list[tf.Variable]:
        """The untrained variables to which each worker adds, so that no single worker's value is right.

        Any value is right if the first replica's is declared, and for Keras's layers except batch normalization.
        """
        layers = [layer for layer in keras.all_layers_in(self.layers.values()) if keras.keeps_means(layer)]
        others = [layer for layer in layers if not isinstance(layer, tf.keras.layers.BatchNormalization)]
        any_will_do = {id(v.value) for layer in others for v in keras.own_untrained(layer)}
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        any_will_do |= {key for key, aggregated in self._declared.items() if aggregated.by == first}
        frozen = map(tf_variable, keras.frozen_weights(self.layers.values()))
        untrained = {id(v): v for v in (*self.untrained.values(), *frozen)}
        variables = [*untrained.values(), *map(tf_variable, keras.carried_states(self.layers.values()))]
        return [variable for variable in variables if id(variable) not in any_will_do]

    def step_variant(self) -> tuple:
        """Lists the values that a traced training step depends on: the trained weights and the optimizers' settings.

        Call it before a step is traced or run.

        Raises:
          UsageError: a variable has become trainable that no optimizer has state for.
        """
        optimizers = self.optimizers.values()
        settings = ((("moves_all_rows", one.moves_all_rows), *one.settings.items()) for one in optimizers)
        return self.freezing.frozen, self._trainable(), *settings

    @property
    def trainable_flags(self) -> list[list]:
        """What a program may set between two calls: which layers and weights are trainable."""
        return keras.trainable_flags(self.layers.values())

    def restore_flags(self, flags: list[list]) -> None:
        """Sets flags, or those of the trainer as it was built for none; those of another model have no effect."""
        flags = flags or self.built_flags
        if [name for name, _ in flags] == [name for name, _ in self.trainable_flags]:
            keras.set_trainable(self.layers.values(), flags)

    def _trainable(self) -> tuple:
        """Lists the trainable layers and weights, which a program may change between two calls."""
        layers = keras.all_layers_in(self.layers.values())
        weights = {id(v): v for layer in layers for v in map(tf_variable, layer.trainable_variables)}
        flags = tuple(layer.trainable for layer in layers)
        if self._variant_before is None:
            self._trainable_at_first = frozenset(weights)
        elif (flags, frozenset(weights)) != self._variant_before:
            optimized = {id(v) for optimizer in self.optimizers.values() for v in optimizer.all_variables}
            optimized |= self._trainable_at_first
            new = [weight for key, weight in weights.items() if key not in optimized]
            if new and self.optimizers:
                raise UsageError(
                    f"{variable_path(new[0])} has been made trainable in the run, and its optimizer has no state for "
                    "it; make it trainable where the model is made, and set trainable=False between two calls, or set "
                    "freeze"
                )
        self._variant_before = flags, frozenset(weights)
        return self._variant_before

    def table_figures(self) -> dict[str, tf.Tensor]:
        """Computes the figures of tables with `admit_after`, as NAME/rows_given; see `Embedding.figures`."""
        return {
            f"{table.name}/{figure}": value
            for table in self.tables.values()
            for figure, value in table.figures().items()
        }


class Freezing:
    """The weights that are frozen, step by step.

    A frozen weight keeps its slots and its count of updates, so its first update is that of a new run.

    Args:
      rules: (regular expression, step): a weight whose path it matches is not updated before that step, with None
        never. If several match a weight, the latest step decides.

    Attributes:
      step: returns the run's step, which its `TrainState` sets.

    Raises:
      UsageError: a rule matches no weight, or none is left to train.
    """

    def __init__(self, rules: Sequence[tuple[str, int | None]], optimizers: Iterable[Optimizer]):
        self.step: Callable[[], int] = lambda: 0
        weights = {key: path for optimizer in optimizers for key, path in optimizer.paths.items()}
        until: dict[int, float] = {}
        for pattern, end in rules:
            matching = [key for key, path in weights.items() if re.search(pattern, path)]
            if weights and not matching:  # without weights, the step's own check reports it
                raise UsageError(
                    f"freeze={pattern} matches the path of none of the {len(weights)} weights, such as "
                    f"{next(iter(weights.values()), '-')}; use a part of a path, or a regular expression"
                )
            for key in matching:
                until[key] = max(until.get(key, 0), math.inf if end is None else end)
        if until and len(until) == len(weights):
            raise UsageError(
                f"freeze={rules[0][0]} and all rules together freeze each of the {len(weights)} weights, and nothing "
                "is left to train; leave some out"
            )
        self._ends = sorted({end for end in until.values() if end < math.inf})
        self._sets = [frozenset(key for key, end in until.items() if end > step) for step in (0, *self._ends)]

    def next_change(self, step: int) -> int | None:
        """Returns the next step at which the frozen weights change; None if there is none."""
        return next((int(end) for end in self._ends if end > step), None)

    @property
    def frozen(self) -> frozenset[int]:
        """The `id`s of the tf.Variables that are frozen at the run's step."""
        step = self.step()
        return self._sets[sum(end <= step for end in self._ends)]
