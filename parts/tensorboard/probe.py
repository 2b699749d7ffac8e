"""What TensorBoard shows of a training step: the step itself leaves it in variables, which are in no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ...engine.data import form
from ...engine.internals.variables import assign_local, compiled_once, own_copy, tf_variable
from ...engine.mesh.sharded import variable_sharding
from ...engine.step.gradients import Gradients
from .event_values import Histogram, histogram, looks_like_images

_PICTURES = 9


class Probe:
    """Histograms of a step's gradients, and its first examples if they look like images, of the first replica.

    A step leaves them if it collects the gradients' norm, since a hook is due after it.

    Args:
      strategy: the run's, bound to its data. Make the probe before a step is traced.
      histograms: whether steps leave histograms.
    """

    def __init__(self, strategy, trainer, histograms: bool = True):
        with strategy.scope():
            self._variables: dict[int, tf.Variable] = {}
            self._names: dict[int, str] = {}
            for optimizer in trainer.inventory.optimizers.values() if histograms else ():
                for variable in optimizer.updated_variables:
                    key, path = id(variable), optimizer.paths[id(variable)]
                    is_part = variable_sharding(variable) or strategy.mesh.update_shard(variable)
                    self._names[key] = f"{path}/first_part" if is_part else path
                    self._variables[key] = _variable(tf.zeros([len(_packed(histogram(tf.zeros([0]))))], tf.float64))
            example = form.features(trainer.run_context.example)
            self._pictures = self._number = None
            if looks_like_images(example):
                self._pictures = _variable(tf.zeros([_PICTURES, *example.shape[1:]], example.dtype))
                self._number = _variable(tf.zeros([], tf.int64))
        self._read = compiled_once(self._histograms)
        trainer.inventory.probe = self

    def note_examples(self, batch, collects: tf.Tensor) -> None:
        """Leaves a step's first examples, if it `collects` and they look like images. Replica code."""
        if (pictures := self._pictures) is None:
            return

        def note() -> None:
            some = form.features(batch)[:_PICTURES]
            number = tf.shape(some)[0]
            rest = tf.zeros(tf.concat([[_PICTURES - number], tf.shape(some)[1:]], 0), some.dtype)
            assign_local(pictures, tf.ensure_shape(tf.concat([some, rest], 0), pictures.shape))
            assign_local(self._number, tf.cast(number, tf.int64))

        tf.cond(collects, note, lambda: None)

    def note_gradients(self, gradients: Gradients, variables: Sequence, collects: tf.Tensor) -> None:
        """Leaves histograms of an update's gradients, before clipping, if the step `collects`. Replica code."""
        if not self._variables:
            return

        def note() -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                if (packed := self._variables.get(id(tf_variable(variable)))) is not None:
                    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                    assign_local(packed, _packed(histogram(tf.zeros([0]) if values is None else values)))

        tf.cond(collects, note, lambda: None)

    def gradients(self) -> dict[str, Histogram]:
        """Returns histograms by the variable's path, without entries if no update had its gradient."""
        return self._read()

    def pictures(self) -> tf.Tensor | None:
        """Returns the examples; None if they are no images, or before a step has left any."""
        number = None if self._number is None else own_copy(self._number).numpy()
        return own_copy(self._pictures)[:number] if number else None

    @property
    def has_pictures(self) -> bool:
        """Whether steps leave examples."""
        return self._pictures is not None

    def _histograms(self) -> dict[str, Histogram]:
        values = {self._names[key]: own_copy(packed).read_value() for key, packed in self._variables.items()}
        return {name: Histogram(packed[:-2], packed[-2], packed[-1]) for name, packed in values.items()}


def _packed(one: Histogram) -> tf.Tensor:
    return tf.concat([tf.cast(tf.reshape(part, [-1]), tf.float64) for part in one], 0)


def _variable(value: tf.Tensor) -> tf.Variable:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, trainable=False, aggregation=first)
