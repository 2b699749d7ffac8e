"""Calls and builds Keras models as Keras's `fit` does. Needs names of Keras that it does not document."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from ..errors import UsageError

# The class of `compile` and `fit`: models inherit it, and layers may.
Trainable = TensorFlowTrainer
# Whether the code in this context predicts.
_predicts: contextvars.ContextVar[bool] = contextvars.ContextVar("predicts", default=False)


def symbolic_inputs(model: tf.keras.layers.Layer) -> Any:
    """Returns a model's symbolic inputs, in its own structure; None if unknown."""
    inputs = model.inputs if isinstance(model, tf.keras.Sequential) and model.built else [getattr(model, "input", None)]
    return tf.keras.tree.lists_to_tuples(inputs[0] if len(inputs) == 1 else inputs)


def symbol(spec: Any) -> tf.keras.KerasTensor:
    """Returns the symbol of a tensor, ragged or not, or of its specification."""
    is_ragged = isinstance(spec, (tf.RaggedTensor, tf.RaggedTensorSpec))
    return tf.keras.KerasTensor(spec.shape, spec.dtype.name, ragged=is_ragged)


def with_optional(model: tf.keras.layers.Layer, features: Any) -> Any:
    """Returns features with None for inputs of a functional model, by name, that they lack; Keras checks these."""
    names = getattr(model, "_inputs_struct", None)
    return {**dict.fromkeys(names), **features} if isinstance(names, dict) and isinstance(features, dict) else features


def call(model: tf.keras.layers.Layer, inputs: Any, **training: bool) -> Any:
    """Calls a model as Keras's `fit` does: one whose `call` has no `training` computes as in inference.

    Within `predicting` as its `predict` does, which calls a `predict_step` of the model's own.
    """
    if _predicts.get() and isinstance(model, Trainable):
        if overrides(model, "predict_step"):
            return model.predict_step(tf.keras.utils.pack_x_y_sample_weight(inputs))
        if not has_call(model):
            raise UsageError(
                f"{type(model).__name__} has no call, so it has no predictions; define call or predict_step, or call "
                "predict of one of its parts"
            )
    return model(inputs, **(training if takes_training(model) else {}))


@contextlib.contextmanager
def predicting() -> Iterator[None]:
    """Makes `call` compute predictions in this context."""
    token = _predicts.set(True)
    try:
        yield
    finally:
        _predicts.reset(token)


def traced_for_some_size(trace: Callable[[int | None], Any], size: int) -> Any:
    """Traces for batches of any size, or if that fails of 2, or of a replica's: a step's may be known, or constant.

    Args:
      trace: traces for a size, or for any with None.
      size: the number of examples of a replica's batch.
    """
    try:
        return trace(None)
    except Exception:  # of any class
        with contextlib.suppress(Exception):
            return trace(2)
        return trace(size)  # whose error is the step's own


def has_call(model: tf.keras.layers.Layer) -> bool:
    """Returns whether a model defines `call`, which one that only its own `train_step` computes with may lack."""
    return type(model).call is not tf.keras.Model.call


def takes_training(model: tf.keras.layers.Layer) -> bool:
    """Returns whether a model's `call` has the argument `training`."""
    return model._call_has_training_arg


def build(model: tf.keras.layers.Layer, specs: Any, **training: bool) -> None:
    """Makes a model's variables by a call with symbols or, if that fails, as in Keras's `fit` by tracing one.

    Args:
      specs: nest of specifications of a batch's features.
    """

    def trace() -> None:
        tf.function(lambda inputs: call(model, inputs, **training), autograph=False).get_concrete_function(specs)

    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(specs)):
        trace()  # symbols are dense
        return
    inputs = tf.nest.map_structure(lambda spec: tf.keras.Input(tuple(spec.shape[1:]), dtype=spec.dtype), specs)
    try:
        call(model, inputs, **training)
    except Exception as error:  # of any class: methods that only symbols call may be wrong
        if "returned a non-tensor" in str(error):  # Keras has called it, and only has no node for such outputs
            return
        with contextlib.suppress(Exception):
            trace()
            return
        raise


def refuse_keras_2(model: Any) -> None:
    """Raises `UsageError` for a model or a layer of Keras 2, which is neither of Keras 3 nor a function."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(model).__mro__):
        raise UsageError(
            f"a {type(model).__name__} of tf_keras is of Keras 2, and models here are of Keras 3; make it by `import "
            "keras`, or have it, with its variables, in an attribute of a crankshaft.Trainer that overrides forward"
        )


def overrides(model: tf.keras.layers.Layer, method: str) -> bool:
    """Returns whether a model overrides a method of Keras's trainer."""
    bound = getattr(model, method)
    return getattr(bound, "__func__", bound) not in (getattr(tf.keras.Model, method), getattr(Trainable, method))


def in_float32(output):
    """Returns an output of a layer, as float32 if it is of 16 bits, with Keras's mask."""
    if getattr(output, "dtype", None) not in (tf.bfloat16, tf.float16):
        return output
    wide = tf.cast(output, tf.float32)
    if (mask := backend.get_keras_mask(output)) is not None:
        backend.set_keras_mask(wide, mask)
    return wide


def with_mask(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns values with Keras's mask, bool [batch, length], as Keras's `Masking` and `Embedding` set it."""
    values = tf.identity(values)
    backend.set_keras_mask(values, mask)
    return values
