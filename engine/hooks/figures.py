"""Figures of a run other than metrics: learning rates, the loss scale, rows of tables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..inventory import Inventory


class Figures:
    """Reads a trainer's learning rates, its loss scale and its tables' figures, without waiting for the device."""

    def __init__(self, trainer):
        self._inventory = inventory = Inventory(trainer)
        self._optimizers = inventory.optimizers
        self._loss_scale = inventory.loss_scale and inventory.loss_scale.value

    def read(self) -> dict[str, Any]:
        """Returns `learning_rate` of the last update, by optimizer if there are several, and the others by name."""
        rates = {name: optimizer.last_learning_rate() for name, optimizer in self._optimizers.items()}
        if len(rates) == 1:
            figures = {"learning_rate": next(iter(rates.values()))}
        else:
            figures = {f"learning_rate/{name}": rate for name, rate in rates.items()}
        if self._loss_scale is not None:
            figures["loss_scale"] = tf.convert_to_tensor(self._loss_scale)
        return figures | {f"tables/{name}": value for name, value in self._inventory.table_figures().items()}
