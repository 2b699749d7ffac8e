"""What a trainer has among its attributes: models, layers, tables, optimizers, and their variables. Host code.

The steps at which other weights are frozen are known beforehand. The outer loop ends a call there, and each set of
frozen weights has a compiled program of its own, in which they get no gradient: the backward pass ends where only they
are left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import tensorflow as tf

from .errors import UsageError, setting
from .internals import keras
from .internals.variables import path_of, tf_variable, tracked
from .layers.embeddings import Embedding
from .optimizers import Optimizer
from .optimizers.loss_scale import DynamicLossScale
from .reduction import per_replica
from .reduction.aggregation import Aggregated


class Inventory:
    """The objects in a trainer's attributes, at any depth of lists, dictionaries and modules; each found on first use.

    Args:
      trainer: a `Trainer`.
      declared: the untrained variables that declare an aggregation, by the `id` of the tf.Variable.

    Attributes:
      freezing: the weights that the run does not update, and until when; none until the trainer is prepared.
      options_of: by the `id` of each optimizer, Keras's own too, the run's options whose values it has; likewise.
    """

    def __init__(self, trainer, declared: Mapping[int, Aggregated] | None = None):
        self.trainer = trainer
        self._declared = declared or {}
        self.freezing = Freezing((), ())
        self.options_of: dict[int, set[str]] = {}
        self._trainable_at_first: frozenset[int] = frozenset()
        self._form_before: tuple | None = None  # the last of `_trainable`

    @cached_property
    def layers(self) -> dict[str, tf.keras.layers.Layer]:
        """The Keras layers, models too, by path; those inside another are left out."""
        layers = tracked(self.trainer, tf.keras.layers.Layer)
        inner = {id(layer_in_it) for layer in layers.values() for layer_in_it in keras.layers_in(layer, itself=False)}
        return {path: layer for path, layer in layers.items() if id(layer) not in inner}

    @cached_property
    def tables(self) -> dict[str, Embedding]:
        """The embeddings, by path."""
        return tracked(self.trainer, Embedding)

    @cached_property
    def shards(self) -> list[tf.Variable]:
        """The tables' variables."""
        return [shard for table in self.tables.values() for shard in table.variables_for_gradients]

    @cached_property
    def optimizers(self) -> dict[str, Optimizer]:
        """The engine's optimizers, by path."""
        return tracked(self.trainer, Optimizer)

    @property
    def keras_optimizers(self) -> list[tf.keras.optimizers.Optimizer]:
        """Keras's optimizers among the attributes themselves, which a step applies as they are."""
        return [*tracked(self.trainer, tf.keras.optimizers.Optimizer).values()]

    def options_of_optimizers(self, applied: Collection[int]) -> set[str]:
        """Returns the options whose values some optimizer has: one of the `id`s, or Keras's that a step applies."""
        known = [*applied, *map(id, self.keras_optimizers)]
        return set().union(*(self.options_of.get(each, ()) for each in known))

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """Float16's; None where there is none."""
        return getattr(self.trainer, "loss_scale", None)

    @cached_property
    def moving_statistics(self) -> list[tf.Variable]:
        """Float variables that layers move in the forward pass, such as batch normalisation's."""
        return keras.moving_statistics(self.layers.values())

    @cached_property
    def own_state(self) -> dict[int, tf.Variable]:
        """The untrained variables of layers and among the attributes themselves, by their `id`."""
        keras_variables = [v for layer in keras.all_layers_in(self.layers.values()) for v in keras.own_untrained(layer)]
        variables = [*keras_variables, *tracked(self.trainer, (tf.Variable, tf.keras.Variable)).values()]
        return {id(own): own for own in map(tf_variable, variables) if not own.trainable}

    @cached_property
    def aggregated(self) -> list[Aggregated]:
        """What each replica assigns by itself, and how that becomes one value: as declared; moving statistics' mean."""
        moving = {id(v): Aggregated(v) for v in self.moving_statistics if not per_replica.differs(v)}
        return [*{**moving, **{key: each for key, each in self._declared.items() if key in self.own_state}}.values()]

    @cached_property
    def kept_by_replicas(self) -> list[tf.Variable]:
        """What layers and steps assign that each replica keeps for itself: the state of stateful layers, and others."""
        states = map(tf_variable, keras.states_of(self.layers.values()))
        return [*states, *filter(per_replica.differs, self.own_state.values())]

    @cached_property
    def undeclared(self) -> list[tf.Variable]:
        """The untrained variables of which nothing says how replicas' values become one."""
        means = [layer for layer in keras.all_layers_in(self.layers.values()) if keras.keeps_means(layer)]
        known = {id(v.value) for layer in means for v in keras.own_untrained(layer)} | self._declared.keys()
        return [v for key, v in self.own_state.items() if key not in known and not per_replica.differs(v)]

    @cached_property
    def seed_generators(self) -> list[tf.keras.random.SeedGenerator]:
        """By which Keras's layers sample, in the order of the layers; then those that are attributes."""
        own = tracked(self.trainer, tf.keras.random.SeedGenerator).values()
        return list({id(each): each for each in [*keras.seed_generators(self.layers.values()), *own]}.values())

    @property
    def models(self) -> list[tf.keras.Model]:
        """The Keras models among the layers."""
        return [layer for layer in self.layers.values() if isinstance(layer, tf.keras.Model)]

    @property
    def all_weights(self) -> list:
        """What any step may train: the variables of all layers, then the tables' shards."""
        variables = {id(v): v for layer in self.layers.values() for v in layer.trainable_variables}
        return [*variables.values(), *self.shards]

    @property
    def variables(self) -> list:
        """The variables among the attributes themselves, Keras's or TensorFlow's, of no layer or table."""
        return [*tracked(self.trainer, (tf.Variable, tf.keras.Variable)).values()]

    @property
    def own_variables(self) -> list:
        """Those of `variables` that are trainable, of float dtypes."""
        return [v for v in self.variables if v.trainable and tf.as_dtype(v.dtype).is_floating]

    @property
    def steady_variables(self) -> list[tf.keras.Variable]:
        """The layers' float variables that a forward pass leaves as they are: all but moving statistics."""
        return keras.steady_variables(list(self.layers.values()))

    @property
    def moved_variables(self) -> list[tf.keras.Variable]:
        """The layers' variables that a forward pass may assign: moving statistics, counts, stateful layers' states."""
        layers = self.layers.values()
        return [*keras.moved_variables(layers), *keras.states_of(layers)]

    @property
    def added_to(self) -> list[tf.Variable]:
        """The untrained variables of which no worker's value will do, since what each adds counts.

        A declared aggregation of the first replica's value says that any will do; so does the code of Keras's layers,
        but of batch normalisation.
        """
        layers = [each for each in keras.all_layers_in(self.layers.values()) if keras.keeps_means(each)]
        others = [each for each in layers if not isinstance(each, tf.keras.layers.BatchNormalization)]
        any_will_do = {id(v.value) for layer in others for v in keras.own_untrained(layer)}
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        any_will_do |= {key for key, each in self._declared.items() if each.by == first}
        variables = [*self.own_state.values(), *map(tf_variable, keras.states_of(self.layers.values()))]
        return [each for each in variables if id(each) not in any_will_do]

    def step_form(self) -> tuple:
        """Returns what a training step that is traced now depends on: what is trained, and the optimizers' settings.

        To be called before a step is traced or run.

        Raises:
          UsageError: a variable has become trainable that no optimizer has state for.
        """
        settings = (tuple(each.settings.items()) for each in self.optimizers.values())
        return self.freezing.frozen, self._trainable(), *settings

    def _trainable(self) -> tuple:
        """Returns which layers and weights are trainable now: a program may change that between two calls."""
        layers = keras.all_layers_in(self.layers.values())
        weights = {id(own): own for layer in layers for own in map(tf_variable, layer.trainable_variables)}
        flags = tuple(layer.trainable for layer in layers)
        if self._form_before is None:
            self._trainable_at_first = frozenset(weights)
        elif (flags, frozenset(weights)) != self._form_before:
            known = {id(each) for optimizer in self.optimizers.values() for each in optimizer.of_variables}
            new = [own for key, own in weights.items() if key not in self._trainable_at_first and key not in known]
            if new and self.optimizers:
                raise UsageError(
                    f"{path_of(new[0])} has been made trainable in the run, and its optimizer has no state for it; "
                    "leave it trainable where the model is made, and set trainable=False between two calls, or give "
                    f"{setting('freeze')}"
                )
        self._form_before = flags, frozenset(weights)
        return self._form_before

    def table_figures(self) -> dict[str, tf.Tensor]:
        """Returns, of tables with `admit_after`, NAME/rows_given and NAME/turned_away (ids without a free row)."""
        return {
            f"{table.name}/{figure}": value
            for table in self.tables.values()
            for figure, value in table.figures().items()
        }


if TYPE_CHECKING:
    from .optimizers import Optimizer


class Freezing:
    """The weights that are frozen, step by step.

    A weight that is frozen keeps its slots and its count of updates (`Optimizer.update_counts`), so its first update is
    that of a new run.

    Args:
      rules: (regular expression, step): a weight in whose path it is found is not updated before that step; None is
        never. Where several find a weight, the last to end decides.
      optimizers: all that update weights.

    Attributes:
      step: returns the run's step, which its `TrainState` sets.

    Raises:
      UsageError: a rule finds no weight, or none is left to train.
    """

    def __init__(self, rules: Sequence[tuple[str, int | None]], optimizers: Iterable[Optimizer]):
        self.step: Callable[[], int] = lambda: 0
        weights = {key: path for each in optimizers for key, path in each.paths.items()}
        until: dict[int, float] = {}
        for pattern, end in rules:
            matching = [key for key, path in weights.items() if re.search(pattern, path)]
            if weights and not matching:  # without any, the step shows that nothing is frozen
                raise UsageError(
                    f"{setting('freeze', pattern)} is found in the path of none of the {len(weights)} weights, such as "
                    f"{next(iter(weights.values()), '-')}; give a part of one, or a regular expression"
                )
            for key in matching:
                until[key] = max(until.get(key, 0), math.inf if end is None else end)
        if until and len(until) == len(weights):
            raise UsageError(
                f"{setting('freeze', rules[0][0])} and all rules together freeze each of the {len(weights)} weights, "
                "and nothing is left to train; leave some out"
            )
        self._ends = sorted({end for end in until.values() if end < math.inf})
        self._sets = [frozenset(key for key, end in until.items() if end > step) for step in (0, *self._ends)]

    def next_change(self, step: int) -> int | None:
        """Returns the next step at which other weights are frozen; None if there is none."""
        return next((int(end) for end in self._ends if end > step), None)

    @property
    def frozen(self) -> frozenset[int]:
        """The `id`s of the tf.Variables that are frozen at the run's step."""
        step = self.step()
        return self._sets[sum(end <= step for end in self._ends)]

    def updates(self, variable) -> bool:
        """Returns whether the run's step may update a variable, Keras's or TensorFlow's: one that is not frozen."""
        return id(tf_variable(variable)) not in self.frozen
