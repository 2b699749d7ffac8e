"""Layers for models: Keras's with less work on CPUs; in a separate folder, sharded embedding tables."""

from .keras_layers import BatchNormalization, Conv2DMaxPool, Dense, Products
from .recompute import recomputed

__all__ = ["BatchNormalization", "Conv2DMaxPool", "Dense", "Products", "recomputed"]
