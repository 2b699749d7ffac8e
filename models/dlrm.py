"""DLRM (Naumov et al. 2019): pairwise products of embeddings and numbers, then a dense network."""

from __future__ import annotations

import tensorflow as tf

from ..engine.layers import Products
from ..parts import tables as embeddings
from .tabular import Tabular, relu_layers


class Model(Tabular):
    """Naumov et al., https://arxiv.org/abs/1906.00091, section 2.

    The bottom layers map the numbers to a vector as wide as an embedding. The products of all pairs of vectors, of the
    ids and of the numbers, and the numbers' vector, are the top layers' inputs; for data without numbers, the ids'
    embeddings replace this vector.

    Args:
      width: width of an id's embedding, and of the numbers' vector.
      bottom_units: widths of the dense layers before the one of `width`; unused for data without numbers.
      top_units: widths of the dense layers after the products.
      task: clicks, ratings, or auto, which depends on the data.
      hash_buckets: 0 gives each id its own row; above 0 hashes all ids into so many rows.
      table_capacity: 0, or the number of rows for arbitrary integer ids, which get a row when training sees them.
      admit_after: with `table_capacity`, how often training must see an id before it gets its row.
      evict_after: with `table_capacity`, the steps without an id after which its row is freed for others; 0 is never.
    """

    def __init__(
        self,
        width: int = 16,
        bottom_units: tuple[int, ...] = (64,),
        top_units: tuple[int, ...] = (128, 64),
        **arguments,
    ):
        super().__init__(**arguments)
        self.width = width
        self.bottom_units = bottom_units
        self.top_units = top_units

    def build_tables(self) -> None:
        rows = self.table_rows if self.accepts_any_id else self.table_rows / len(self.fields)
        self.embedding = self.table("embedding", self.width, initializer=embeddings.uniform(rows**-0.5))

    def build_model(self) -> tf.keras.Model:
        vectors = tf.keras.Input([len(self.fields), self.width], name="embedded")
        inputs = {"embedded": vectors}
        if self.num_numbers:
            inputs["numbers"] = tf.keras.Input([self.num_numbers], name="numbers")
            first = relu_layers(inputs["numbers"], (*self.bottom_units, self.width), "bottom")
            vectors = tf.keras.layers.Concatenate(axis=1)([tf.keras.layers.Reshape([1, self.width])(first), vectors])
        else:
            first = tf.keras.layers.Flatten()(vectors)
        products = Products(name="products")(vectors)
        x = relu_layers(tf.keras.layers.Concatenate()([first, products]), self.top_units, "top")
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="output")(x), name="dlrm")

    def forward(self, features, training: bool):
        inputs = {"embedded": self.embedding(self.ids(features), training=training)}
        if self.num_numbers:
            inputs["numbers"] = self.numbers(features)
        return tf.cast(self.model(inputs, training=training), tf.float32)[:, 0]
