"""The base of models of ids and numbers: features in one form, loss and metrics by the labels. Replica code."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from ..engine import hashing
from ..engine.data import form
from ..engine.errors import UsageError
from ..engine.metrics.means import auc, mean, root_mean_square
from ..engine.metrics.pairs import Mean
from ..engine.trainer import Trainer
from ..parts.tables import Embedding

TASKS = ("auto", "clicks", "ratings")


class Field(NamedTuple):
    """One id of an example: the feature, its column (None for a feature without columns), and the number of ids."""

    feature: str
    column: int | None
    rows: int

    @property
    def name(self) -> str:
        return self.feature if self.column is None else f"{self.feature}.{self.column}"


class Tabular(Trainer):
    """A trainer of a model of ids and numbers with one output per example.

    Features are a dictionary of ids (integers, [batch] or [batch, columns]) and numbers (floats, of the same shapes);
    the output, [batch], is the log-odds of a click, or a rating.

    The input specifies how many ids a feature has (`vocabulary`); an id out of range counts as id 0. All fields' ids
    share one table, in which each field has its own rows, so a step has one lookup.

    Args:
      task: "clicks" (labels 0 or 1: cross-entropy, `auc`, `log_loss`), "ratings" (numbers: squared error, `rmse`,
        `mae`), or "auto": clicks where labels are classes 0 and 1, ratings where they are floats or the features are
        `user` and `item`. More classes are refused.
      hash_buckets: 0 gives each id its own row; above 0 hashes all fields' ids into so many rows (Weinberger et al.
        2009, https://arxiv.org/abs/0902.2206), for an unknown number of ids.
      table_capacity: 0 gives each id its own row; above 0 is the number of rows for arbitrary int64 ids, each of which
        gets one when training sees it; other ids take no memory.
      admit_after: with `table_capacity`, how often training must see an id before it gets a row (1 to 255).
      evict_after: with `table_capacity`, the steps without an id after which its row is freed for others; 0 is never.
    """

    needs_labels = True

    def __init__(
        self,
        task: str = "auto",
        hash_buckets: int = 0,
        table_capacity: int = 0,
        admit_after: int = 1,
        evict_after: int = 0,
    ):
        super().__init__()
        if task not in TASKS:
            raise UsageError(f"task={task} is unknown; use one of {', '.join(TASKS)}")
        self.task = task
        if hash_buckets and table_capacity:
            raise UsageError(
                f"hash_buckets={hash_buckets} and table_capacity={table_capacity} both say which row an id has; use one"
            )
        self.hash_buckets = hash_buckets
        self.table_capacity = table_capacity
        self.admit_after = admit_after
        self.evict_after = evict_after

    @classmethod
    def splits_batch(cls, table_capacity: int = 0, **arguments) -> bool:
        return not table_capacity  # a table that assigns rows must see a batch only once

    @classmethod
    def find_classes(cls, split, task: str = "auto", **arguments) -> int | None:
        example = form.fields(split.element_spec)
        is_open = split.as_arrays() is None and task == "auto" and not {"user", "item"} <= set(example.features)
        if is_open and tf.as_dtype(example.labels.dtype).is_floating:
            raise UsageError(
                f"{cls.__module__}: the labels are floats that are read as training goes, so whether they are clicks "
                "(0 and 1) or numbers is not known; use model_arg=task=clicks or model_arg=task=ratings"
            )
        return form.num_classes(split)

    def check_compatible(self, checkpoint, arguments, vocabulary=None) -> None:
        capacity = arguments.get("table_capacity")
        if self.needs_capacity and capacity not in (None, self.table_capacity):
            raise UsageError(
                f"{checkpoint} has rows of crosses that are hashed by table_capacity={capacity}, and "
                f"table_capacity={self.table_capacity} gives crosses others; keep it, or begin a run without crosses"
            )
        if vocabulary is None or self.accepts_any_id:
            return
        # Features have their rows in one table, one after the other, so the last alone may have more ids than before.
        for field in self.fields:
            rows = vocabulary.get(field.feature, field.rows)
            if rows > field.rows or (rows != field.rows and (field.feature != self.fields[-1].feature or field.column)):
                raise UsageError(
                    f"feature {field.feature!r} has {field.rows:,} ids, and {rows:,} in {checkpoint}: its table's "
                    "rows would be those of other ids; begin a run with model_arg=table_capacity=N or "
                    "model_arg=hash_buckets=N, which has room for ids to come"
                )

    def build(self) -> None:
        classes = self.run_context.num_classes or 0
        if classes > 2 and self.task != "ratings" and not (self.task == "auto" and self._has_ratings_names):
            raise UsageError(
                f"labels are classes 0 to {classes - 1}, and {type(self).__module__} predicts clicks (0 or 1) or a "
                "number; give labels of two classes, or use model_arg task=ratings if they are numbers"
            )
        self.fields = self._find_fields()
        self.logits_kind = "clicks" if self.predicts_clicks else None
        self.build_tables()
        super().build()

    def build_tables(self) -> None:
        """Creates the embeddings, as attributes, from `fields`."""
        raise NotImplementedError

    def table(self, name: str, width: int, **arguments) -> Embedding:
        """Creates a table for `ids`."""
        return Embedding(
            name,
            self.table_rows,
            width,
            hash_ids=bool(self.hash_buckets),
            admit_after=self.admit_after if self.table_capacity else None,
            evict_after=self.evict_after or None,
            **arguments,
        )

    @property
    def accepts_any_id(self) -> bool:
        """Whether ids are any integers, rather than 0..rows-1 of their field."""
        return bool(self.hash_buckets or self.table_capacity)

    @property
    def needs_capacity(self) -> bool:
        """Whether rows of a checkpoint would be those of other ids with another `table_capacity`."""
        return False

    @property
    def table_rows(self) -> int:
        return self.hash_buckets or self.table_capacity or sum(field.rows for field in self.fields)

    def ids(self, features: dict) -> tf.Tensor:
        """Returns the ids of examples, int64 [batch, fields]; fields share an id only with a probability of 2^-64."""
        if self.accepts_any_id:
            return hashing.by_column(self.columns(features))
        # In the table, each field's rows begin after those of the fields before it.
        firsts = [sum(field.rows for field in self.fields[:i]) for i in range(len(self.fields))]
        return self.columns(features) + firsts

    def columns(self, features: dict) -> tf.Tensor:
        """Returns each field's own ids, int64 [batch, fields]; those out of range are 0."""
        names = dict.fromkeys(field.feature for field in self.fields)
        ids = _joined([tf.cast(features[name], tf.int64) for name in names])
        in_range = (ids >= 0) & (ids < [field.rows for field in self.fields])
        return ids if self.accepts_any_id else tf.where(in_range, ids, 0)

    def numbers(self, features: dict) -> tf.Tensor | None:
        """Returns the features that are not ids, sorted by name, float32 [batch, numbers]; None if there are none."""
        numbers = [tf.cast(features[name], tf.float32) for name in sorted(features) if features[name].dtype.is_floating]
        return _joined(numbers) if numbers else None

    @property
    def num_numbers(self) -> int:
        """The number of numeric values per example."""
        numbers = self.numbers(tf.nest.map_structure(tf.convert_to_tensor, form.features(self.run_context.example)))
        return 0 if numbers is None else numbers.shape[1]

    def _find_fields(self) -> list[Field]:
        features, vocabulary = form.features(self.run_context.example), self.run_context.vocabulary or {}
        if not isinstance(features, dict):
            raise UsageError(
                f"{type(self).__module__} takes features by name, and the data has one array; use an input of ids, "
                "such as ratings, criteo or synthetic_clicks"
            )
        if not self.accepts_any_id and not vocabulary:
            raise UsageError(
                f"{type(self).__module__} needs to know how many ids the features have, and the data does not say; "
                "return a vocabulary from the data function, or use model_arg hash_buckets=100000"
            )
        fields = []
        for name, value in sorted(features.items()):
            if isinstance(value, form.Padded):
                raise UsageError(
                    f"{type(self).__module__} takes examples of one length, and those of feature {name!r} differ; "
                    "leave it out (input_arg=features=...), or write a trainer that takes its Padded"
                )
            dtype = tf.as_dtype(value.dtype)
            if dtype.is_floating:
                continue
            if dtype == tf.string:
                raise UsageError(
                    f"{type(self).__module__} takes ids and numbers, and feature {name!r} is text; leave "
                    "input_arg=text=keep out, or make ids of it in the data function"
                )
            if not (self.accepts_any_id or name in vocabulary):
                raise UsageError(
                    f"feature {name!r} holds integers, and the data does not say how many ids they are; use model_arg "
                    "hash_buckets=100000, or make numbers of them (input_arg=numbers=NAME, float32)"
                )
            rows = self.hash_buckets or self.table_capacity or vocabulary[name]
            columns = [None] if len(value.shape) == 1 else range(value.shape[1])
            fields += [Field(name, column, rows) for column in columns]
        if not fields:
            raise UsageError(
                f"{type(self).__module__} needs ids, and no feature is an id; those of the data are "
                f"{', '.join(sorted(features))}, those with a vocabulary {', '.join(sorted(vocabulary)) or 'none'}"
            )
        return fields

    @property
    def predicts_clicks(self) -> bool:
        """Whether the task, as set or inferred from the data, is clicks; else it is ratings."""
        if self.task != "auto":
            return self.task == "clicks"
        if self.run_context.num_classes is not None:
            return self.run_context.num_classes <= 2
        labels = form.fields(self.run_context.example).labels
        is_number = labels is not None and tf.as_dtype(labels.dtype).is_floating
        return not is_number and not self._has_ratings_names

    @property
    def _has_ratings_names(self) -> bool:
        return {"user", "item"} <= set(form.features(self.run_context.example))

    def loss(self, outputs, batch) -> Mean:
        return mean(self._losses(outputs, batch[1]))

    def metrics(self, outputs, batch) -> dict:
        outputs, labels = tf.cast(outputs, tf.float32), tf.cast(batch[1], tf.float32)
        if self.predicts_clicks:
            return {"auc": auc(labels, outputs), "log_loss": mean(self._losses(outputs, labels))}
        return {"rmse": root_mean_square(outputs - labels), "mae": mean(tf.abs(outputs - labels))}

    def _losses(self, outputs, labels) -> tf.Tensor:
        outputs, labels = tf.cast(outputs, tf.float32), tf.cast(labels, tf.float32)
        if self.predicts_clicks:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=outputs)
            # Other labels have no cross-entropy; `auc` reports them. A sum adds no cost to the gradient.
            return losses + tf.where((labels == 0.0) | (labels == 1.0), 0.0, math.nan)
        return tf.math.squared_difference(outputs, labels)


def _joined(features: list[tf.Tensor]) -> tf.Tensor:
    """Concatenates features [batch] or [batch, columns] to [batch, columns]."""
    return tf.concat([x if x.shape.rank == 2 else x[:, None] for x in features], 1)


def relu_layers(x, units: tuple[int, ...], name: str):
    """Applies dense layers with ReLU to a symbolic tensor."""
    for i, width in enumerate(units):
        x = tf.keras.layers.Dense(width, activation="relu", name=f"{name}_{i}")(x)
    return x
