"""The variables that a function creates, found without creating them: a dry run."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ...engine import logging
from ...engine.internals.tensorflow import variable_without_value


@dataclasses.dataclass
class PlannedVariable:
    """A variable to be created.

    Attributes:
      name, path: the variable's name without, and with the scopes around it.
      bytes: size in bytes of the variable alone.
      device: the requested device, or empty.
      weight: size in bytes of the variable and of those placed beside it.
    """

    name: str
    path: str
    bytes: int
    device: str
    weight: int


def dry_run(make: Callable[[], Any]) -> list[PlannedVariable]:
    """Returns the variables that `make` creates independently of others, in order; [] if unknown.

    Calls it in a graph that is never run, so nothing has a variable's size, and in its own thread, where Keras numbers
    layers from the start. A `make` that reads values (e.g. of a variable) fails there.
    """
    by_op: dict[str, PlannedVariable] = {}

    def record(next_creator, **keywords):
        name, path = name_and_path(keywords)
        shape, dtype = shape_and_dtype(keywords)
        size = num_bytes(shape, dtype)
        variable = variable_without_value(shape, dtype, keywords.get("name"), keywords.get("trainable"))
        op = variable.handle.op
        (group,) = (name.decode().removeprefix("loc:@") for name in op.colocation_groups())
        if group == op.name:  # no sibling op
            by_op[op.name] = PlannedVariable(name, path, size, variable.device, size)
        else:
            by_op[group].weight += size
        return variable

    def build() -> None:
        try:
            with tf.Graph().as_default(), tf.variable_creator_scope(record):
                make()
        except Exception as error:  # of any kind: a mistake will be raised again
            by_op.clear()
            logging.info("variables are placed in the order in which they are made: %s", error)

    thread = threading.Thread(target=build, name="rehearsal")
    thread.start()
    thread.join()
    return list(by_op.values())


def name_and_path(keywords: dict) -> tuple[str, str]:
    """Returns the name of a variable to be created, without and with the scopes around it."""
    name = keywords.get("name") or "variable"
    return name, "/".join(filter(None, [tf.get_current_name_scope(), name]))


def shape_and_dtype(keywords: dict) -> tuple[tf.TensorShape, tf.DType]:
    """Returns the shape and dtype of a variable to be created. Traces a function for the initial value."""
    value: Any = keywords.get("initial_value")
    shape, dtype = keywords.get("shape"), keywords.get("dtype")
    if shape is None or dtype is None:
        if callable(value):
            value = tf.function(value, autograph=False).get_concrete_function().structured_outputs
        value = value if hasattr(value, "dtype") and hasattr(value, "shape") else tf.convert_to_tensor(value)
        shape, dtype = value.shape if shape is None else shape, value.dtype if dtype is None else dtype
    return tf.TensorShape(shape), tf.as_dtype(dtype)


def num_bytes(shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Returns the bytes of a variable; 0 if its shape is unknown."""
    return (shape.num_elements() or 0) * dtype.size
