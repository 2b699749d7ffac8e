"""Names of a model's numbers: its classes, and the text that its ids stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from ...engine.data import form
from ...engine.data.preprocessing import UNCHANGED
from ...engine.data.run_data import Data
from ..command_line.values import short
from ..failures import UsageError


class Names:
    """Names classes, and converts raw features as the training data was converted.

    Attributes:
      classes: the names of classes in the order of the label numbers; None where they have none.
      words: the words, bytes, of each feature that was text; the first has id 1, and unknown words 0.
      may_lack: whether columns may lack values, which are filled.
    """

    def __init__(self, data_info: Data):
        self.classes = data_info.classes
        self.words = data_info.preprocessing.words
        self.may_lack = data_info.preprocessing.may_lack
        self._preprocessing = data_info.preprocessing

    def __repr__(self) -> str:
        words = {name: f"{len(words):,} words" for name, words in self.words.items()}
        return f"Names(classes={self.classes}, words={words})"

    @property
    def look_up(self) -> Callable[[Any], Any] | None:
        """`ids`; None if the training data had no preprocessing."""
        return None if self._preprocessing == UNCHANGED else self.ids

    def ids(self, features: Any) -> Any:
        """Returns features as the model takes them: words looked up or hashed, dates as numbers, missing values filled.

        Features that are preprocessed already stay unchanged, except ids that are numbered. Missing raw values are NaN,
        the least int64, empty text. Columns by name become an array in the order of training, where the model takes
        one.
        """
        if isinstance(features, dict) and self._preprocessing.array:
            check_names("the data", self._preprocessing.array, features)
        return self._preprocessing(features)


def check_names(data_name: str, trained: Collection[str], present: Collection[str]) -> None:
    """Raises `UsageError` unless features, or the columns of an array, have the names of those trained on."""
    missing, unknown = ([name for name in x if name not in y] for x, y in ((trained, present), (present, trained)))
    lines = {"missing": missing, "unknown": unknown}
    if differ := "; ".join(f"{line}: {short(', '.join(names))}" for line, names in lines.items() if names):
        raise UsageError(
            f"{data_name} has other features than this run was trained on ({differ}); name them as they were, "
            f"{short(', '.join(trained))}"
        )


def check_trained(data_name: str, trained: tuple[Data, Any], now: tuple[Data, Any]) -> None:
    """Raises `UsageError` where data can't be read by the names of the features that a run was trained on.

    Args:
      trained: the description of the run's data, and a nest of its features.
      now: description of the new data, and a nest of its features.
    """
    before, after = (
        data_info.preprocessing.array or (isinstance(x, dict) and tuple(sorted(x))) for data_info, x in (trained, now)
    )
    if not before or not after or before == after:
        return
    check_names(data_name, before, after)
    raise UsageError(
        f"{data_name} has the columns of its array in another order than this run was trained on, which is "
        f"{short(', '.join(before))}; write them in that order"
    )


def check_info(data_info: Data, example: Any) -> Data:
    """Returns the data's description with names in one form. Raises `UsageError` if it contradicts the data."""
    classes, columns = data_info.classes, data_info.preprocessing.columns
    if classes is not None:
        classes = tuple(map(str, classes))
        if len(classes) != data_info.num_classes:
            raise UsageError(
                f"the data names {len(classes)} classes, and num_classes={data_info.num_classes}; name each"
            )
    features = form.features(example)
    for name in data_info.preprocessing.words:
        if not isinstance(features, dict) or name not in features or features[name].dtype.kind not in "iu":
            raise UsageError(
                f"the data has words of {name!r}, which is not a feature of integers by that name; leave them out"
            )
    columns = {
        name: column._replace(words=tuple(map(tf.compat.as_bytes, column.words))) for name, column in columns.items()
    }
    preprocessing = dataclasses.replace(data_info.preprocessing, columns=columns)
    return dataclasses.replace(data_info, classes=classes, preprocessing=preprocessing)
