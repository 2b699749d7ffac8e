"""A run's data: its splits and their properties. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .preprocessing import UNCHANGED, Preprocessing


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run, from the input to the session.

    Attributes:
      train: the training data: `(features, labels)`, `(features, labels, weights)`, `(features,)` or a dict of
        features, of NumPy arrays whose first axis is examples, or dicts and tuples of such; or a `tf.data.Dataset` of
        such examples, unbatched; or a `Source` or a `Stream` (`engine.data`). Several inputs per step are a dict of
        these by name, each with its own batch size, order and position; a dict of arrays is features.
      evaluation: the evaluation data, in the same form, or None. Several sets are a dict of these by name, each a
        tuple, a dataset, a `Source` or a `Stream`: metrics are NAME/loss then.
      num_classes: number of classes; None if labels are not classes.
      vocabulary: number of ids (0..count-1) of each feature that is an id, in each of its columns; 0 is a missing or
        unknown id. None if no feature is an id.
      ids: identifies the numbering of ids, e.g. its digest; None if it does not depend on the training data.
      tokens: the tokenizer of text, for models that generate: `input.files.tokens.Bytes` or `Vocabulary` alone.
      classes: the classes' names, in the order of label numbers; None if they have only numbers.
      preprocessing: converts columns to features, such as text to ids (`engine.data.preprocessing.Preprocessing`). The
        examples are converted already; predictions and exports convert raw values by it.
      columns: how each column of a table is read; lines for people.
      class_weight: weights of training classes, by class; 1 for classes without one. None: all are 1.
      batch_sizes: with several inputs, examples per step by name, across replicas; the global batch size for the first
        and for those without one. {} says that a dict whose values are all tuples of arrays is several inputs.
      flags: values of a run's flags that wait for the data, by name. `crankshaft.fit` sets them.

    Example:
      >>> import numpy as np
      >>> images, labels = np.zeros([100, 28, 28], "float32"), np.zeros([100], "int32")
      >>> data = Data((images[:80], labels[:80]), (images[80:], labels[80:]), num_classes=10)
    """

    train: Any
    evaluation: Any = None
    num_classes: int | None = None
    vocabulary: dict[str, int] | None = None
    ids: int | str | None = None
    tokens: Any = None
    classes: tuple[str, ...] | None = None
    columns: str | None = None
    preprocessing: Preprocessing = UNCHANGED
    class_weight: Mapping[int, float] | None = None
    batch_sizes: Mapping[str, int] | None = None
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Any]:
        """The data by "train" and "eval"; of several evaluation sets by "eval/NAME"."""
        named = {"eval": self.evaluation}
        if isinstance(self.evaluation, dict):
            named = {f"eval/{name}": split for name, split in self.evaluation.items()}
        return {name: split for name, split in {"train": self.train, **named}.items() if split is not None}
