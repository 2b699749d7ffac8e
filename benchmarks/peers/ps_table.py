"""A model that is one embedding table and nothing else, to time what servers do for it. Runs in a cluster's tasks.

`crankshaft local --ps=2 -- benchmarks/peers/ps_table.py --input=synthetic_clicks --train_steps=100`
"""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine import build_embeddings, make_optimizer
from crankshaft.engine.layers.embeddings import Embedding, zeros
from crankshaft.launch import train
from crankshaft.models.tabular import Tabular


class EachId(Embedding):
    """A table that looks up each id by itself, though others are the same: what unique-first is compared with."""

    def _read(self, rows: tf.Tensor) -> tf.Tensor:
        return self._gather(rows, tf.identity)


class Table(Tabular):
    """The log-odds of a click are the sum of all numbers in its ids' rows.

    Args:
      width: of a row.
      unique_first: look each different id up once.
    """

    def __init__(self, width: int = 16, unique_first: bool = True):
        super().__init__()
        self.width = width
        self.unique_first = unique_first

    def build(self) -> None:
        self.fields = self._find_fields()
        kind = Embedding if self.unique_first else EachId
        self.embedding = kind("table", sum(field.rows for field in self.fields), self.width, initializer=zeros())
        build_embeddings(self)
        self.optimizer = make_optimizer(self, self.trainable_variables)

    def forward(self, features, training: bool):
        return tf.reduce_sum(self.embedding(self.ids(features)), [1, 2])

    def metrics(self, outputs, batch) -> dict:
        return {}  # an AUC would cost more than the table


if __name__ == "__main__":
    train.main(Table)
