"""What a run asks a trainer besides its steps, such as what its data must have. Runs on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from .inventory import Inventory


class Traits:
    """What is true of a trainer that makes a model of its own; of other trainers, what they override.

    Attributes:
      inventory: the objects in the trainer's attributes, which the engine sets after `build`.
      needs_labels: whether data must have labels.
      needs_classes: whether data must have a number of classes, and features in one array.
      logits_kind: which logits `forward` outputs, "clicks" or "classes", by which predictions are described.
      is_built: whether the model exists before the run, which trains it, or a copy of it.
      default_policy: the policy by which the program makes layers; None takes the run's.
      wants_jit: whether the model asks for steps that XLA compiles.
      exchanges_in_own_step: whether a training step of the model's own has layers that sum across replicas.
      compile_values: what the program has decided of the step, plain JSON, which checkpoints keep.
      compiled_variables: variables of an optimizer that trains a copy of the model further.
    """

    inventory: Inventory
    needs_labels = needs_classes = False
    logits_kind: str | None = None
    is_built = False
    exchanges_in_own_step = False
    default_policy: tf.keras.DTypePolicy | None = None
    wants_jit = False
    compile_values: Mapping[str, Any] = {}
    compiled_variables: Sequence[tf.keras.Variable] = ()

    @classmethod
    def trains_in_place(cls, distribution: tf.distribute.Strategy) -> bool:
        """Returns whether a model that exists is trained itself, and not a copy of it."""
        return False

    @classmethod
    def find_classes(cls, split: Any, **arguments: Any) -> int | None:
        """Returns the number of classes of a split whose data does not say it, of a trainer with these arguments."""
        return None

    def check_compatible(
        self, checkpoint: str, arguments: Mapping[str, Any], vocabulary: Mapping[str, int] | None = None
    ) -> None:
        """Raises `UsageError` if a checkpoint's weights would have another meaning in this trainer.

        Args:
          checkpoint: the name by which a line calls it.
          arguments: the `model_arg`s of the trainer that wrote it.
          vocabulary: vocabulary of its data; None where the data is known to be the same.
        """
