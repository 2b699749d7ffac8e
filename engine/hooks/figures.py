"""Figures of a run other than metrics: learning rates, the loss scale, rows of tables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..inventory import Inventory


def read(inventory: Inventory) -> dict[str, Any]:
    """Reads `learning_rate` of the last update, by optimizer if there are several, and the others by name.

    Returns tensors where the device computes a figure: whoever needs the number waits, not the training thread.
    """
    rates = {name: optimizer.last_learning_rate() for name, optimizer in inventory.optimizers.items()}
    if len(rates) == 1:
        figures = {"learning_rate": next(iter(rates.values()))}
    else:
        figures = {f"learning_rate/{name}": rate for name, rate in rates.items()}
    if inventory.loss_scale is not None:
        figures["loss_scale"] = tf.convert_to_tensor(inventory.loss_scale.value)
    return figures | {f"tables/{name}": value for name, value in inventory.table_figures().items()}
