"""Wide & Deep (Cheng et al. 2016): a linear model of ids and their crosses beside a deep one of their embeddings."""

from __future__ import annotations

import itertools

import tensorflow as tf

from ..engine.errors import UsageError
from ..parts import tables as embeddings
from ..parts.tables import Embedding
from .tabular import Tabular, relu_layers


class Model(Tabular):
    """Cheng et al., https://arxiv.org/abs/1606.07792, figure 1: the sum of the two parts' outputs.

    Wide: a weight for each id, and for each pair of ids in `crosses` (the cross-product transformation, hashed). Deep:
    the ids' embeddings and the numbers, concatenated, through dense layers with ReLU. The paper trains the wide part by
    FTRL and the deep one by AdaGrad; here one optimizer trains both, so an id's embedding and its weight are one row of
    one table, looked up and updated at once: the weight is the row's last number.

    Args:
      width: width of an id's embedding.
      hidden_units: widths of the dense layers.
      crosses: pairs of fields, as `user:item`; a feature of several columns has the fields `categories.0`, ...; `all`
        is every pair.
      cross_buckets: number of rows for hashed crosses.
      task: clicks, ratings, or auto, which depends on the data.
      hash_buckets: 0 gives each id its own row; above 0 hashes all ids into so many rows.
      table_capacity: 0, or the number of rows for arbitrary integer ids, which get a row when training sees them.
      admit_after: with `table_capacity`, how often training must see an id before it gets its row.
      evict_after: with `table_capacity`, the steps without an id after which its row is freed for others; 0 is never.
    """

    def __init__(
        self,
        width: int = 16,
        hidden_units: tuple[int, ...] = (128, 64),
        crosses: tuple[str, ...] = (),
        cross_buckets: int = 100000,
        **arguments,
    ):
        super().__init__(**arguments)
        self.width = width
        self.hidden_units = hidden_units
        self.crosses = crosses
        self.cross_buckets = cross_buckets

    def build_tables(self) -> None:
        self.pairs = self._find_pairs()
        deep = embeddings.uniform()

        def rows(samples):  # whose last number, of the wide part, is 0
            return tf.concat([deep(samples[:, :-1]), tf.zeros_like(samples[:, :1])], 1)

        self.embedding = self.table("embedding", self.width + 1, initializer=rows)
        if self.pairs:
            self.cross_table = Embedding(
                "crosses", self.cross_buckets, 1, combiner="sum", hash_ids=True, initializer=embeddings.zeros()
            )

    def build_model(self) -> tf.keras.Model:
        embedded = tf.keras.Input([len(self.fields) * self.width], name="embedded")
        inputs, parts = {"embedded": embedded}, [embedded]
        if self.num_numbers:
            inputs["numbers"] = tf.keras.Input([self.num_numbers], name="numbers")
            parts.append(inputs["numbers"])
        x = tf.keras.layers.Concatenate()(parts) if len(parts) > 1 else embedded
        x = relu_layers(x, self.hidden_units, "deep")
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="output")(x), name="wide_deep")

    def forward(self, features, training: bool):
        ids = self.ids(features)
        embedded, wide = tf.split(self.embedding(ids, training=training), [self.width, 1], axis=-1)
        inputs = {"embedded": tf.reshape(embedded, [-1, len(self.fields) * self.width])}
        if self.num_numbers:
            inputs["numbers"] = self.numbers(features)
        outputs = tf.cast(self.model(inputs, training=training), tf.float32) + tf.reduce_sum(wide, 1)
        if self.pairs:
            # A number for each pair of ids, which no other pair of fields has. An overflow is a hash as well.
            columns, number = self.columns(features), len(self.pairs)
            one, other = (tf.gather(columns, indices, axis=1) for indices in zip(*self.pairs, strict=True))
            crossed = one * [self.fields[b].rows for _, b in self.pairs] + other
            outputs += self.cross_table(crossed * number + tf.range(number, dtype=tf.int64))
        return outputs[:, 0]

    @property
    def needs_capacity(self) -> bool:
        return bool(self.crosses and self.table_capacity)  # crosses are hashed by the capacity

    def _find_pairs(self) -> list[tuple[int, int]]:
        """Returns the crosses, as pairs of their fields' indices."""
        indices = {field.name: i for i, field in enumerate(self.fields)}
        if tuple(self.crosses) == ("all",):
            return list(itertools.combinations(range(len(self.fields)), 2))
        pairs = [tuple(cross.split(":")) for cross in self.crosses]
        for cross, pair in zip(self.crosses, pairs, strict=True):
            if len(pair) != 2 or not set(pair) <= set(indices):
                raise UsageError(
                    f"crosses={cross} is not a pair of fields; use e.g. {':'.join([*indices, '?'][:2])}, or all"
                )
        return [(indices[a], indices[b]) for a, b in pairs]
