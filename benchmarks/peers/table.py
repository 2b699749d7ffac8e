"""A model that is one embedding table and nothing else, to time what servers do for it. Runs in a cluster's tasks.

`crankshaft local --workers=2 --ps=2 -- -m benchmarks.peers.table --input=synthetic_clicks --train_steps=100`
"""

from __future__ import annotations

import tensorflow as tf

from crankshaft import build_embeddings, make_optimizer
from crankshaft.launch import train
from crankshaft.models.tabular import Tabular
from crankshaft.parts.tables import Embedding, zeros


class Table(Tabular):
    """The log-odds of a click are the sum of all numbers in its ids' rows."""

    def build(self) -> None:
        self.fields = self._find_fields()
        self.embedding = Embedding("table", sum(field.rows for field in self.fields), 16, initializer=zeros())
        build_embeddings(self)
        self.optimizer = make_optimizer(self, self.trainable_variables)

    def forward(self, features, training: bool):
        return tf.reduce_sum(self.embedding(self.ids(features)), [1, 2])

    def metrics(self, outputs, batch) -> dict:
        return {}  # an AUC would cost more than the table


if __name__ == "__main__":
    train.main(Table)
