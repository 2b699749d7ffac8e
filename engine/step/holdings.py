"""What a trainer holds among its attributes: models, layers, tables, optimizers, and their variables. Host code."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine import optimizers
from crankshaft.engine.internals import keras
from crankshaft.engine.internals.variables import held
from crankshaft.engine.layers import layer_state
from crankshaft.engine.layers.embeddings import Embedding


class Holdings(tf.Module):
    """Finds them by looking: an attribute that is set, or put into a list or dictionary there, is held."""

    @property
    def models(self) -> list[tf.keras.Model]:
        """The Keras models among this object's attributes, by name; parts of others are left out."""
        return [layer for layer in self.held_layers.values() if isinstance(layer, tf.keras.Model)]

    @property
    def held_layers(self) -> dict[str, tf.keras.layers.Layer]:
        """The Keras layers, models too, among this object's attributes, by path; parts of others are left out."""
        found = held(self, tf.keras.layers.Layer)
        parts = {id(part) for layer in found.values() for part in keras.parts(layer, itself=False)}
        return {path: layer for path, layer in found.items() if id(layer) not in parts}

    @property
    def embedding_tables(self) -> dict[str, Embedding]:
        """The embeddings among this object's attributes."""
        return held(self, Embedding)

    def table_figures(self) -> dict[str, tf.Tensor]:
        """Returns, of embeddings with `admit_after`, NAME/rows_given and NAME/turned_away (ids without a free row)."""
        return {
            f"{table.name}/{figure}": value
            for table in self.embedding_tables.values()
            for figure, value in table.figures().items()
        }

    @property
    def all_weights(self) -> list:
        """What any step may train: the variables of all layers, then the embeddings' shards."""
        found = {id(v): v for layer in self.held_layers.values() for v in layer.trainable_variables}
        return [*found.values(), *self._shards]

    @property
    def _shards(self) -> list[tf.Variable]:
        return [shard for table in self.embedding_tables.values() for shard in table.variables_for_gradients]

    def _averaged(self, variables) -> list:
        """Returns those that a moving average is of: not tables, all of whose rows each step would read and write."""
        shards = {id(shard) for shard in self._shards}
        return [variable for variable in variables if id(variable) not in shards]

    @property
    def optimizers(self) -> dict[str, optimizers.Optimizer]:
        """The engine's optimizers among this object's attributes, by path, in order."""
        return held(self, optimizers.Optimizer)

    @property
    def steady_variables(self) -> list[tf.keras.Variable]:
        """The layers' float variables that a forward pass leaves as they are: all but moving statistics."""
        return layer_state.steady_variables(list(self.held_layers.values()))

    @property
    def moving_statistics(self) -> list[tf.Variable]:
        """Float variables that layers move in the forward pass, such as batch normalisation's mean and variance."""
        return layer_state.moving_statistics(self.held_layers.values())
