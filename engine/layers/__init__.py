"""Layers for models: Keras's with less work on CPUs; in a separate room, embedding tables in shards."""

from .keras_layers import BatchNormalization, Conv2DMaxPool, Dense, Products
from .recompute import recomputed

__all__ = ["BatchNormalization", "Conv2DMaxPool", "Dense", "Products", "recomputed"]
