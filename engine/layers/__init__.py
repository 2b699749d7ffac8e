"""Layers for models: Keras's with less work on CPUs. Runs on the replica."""

from ..step.recompute import recomputed
from .keras_layers import BatchNormalization, Conv2DMaxPool, Dense, Products

__all__ = ["BatchNormalization", "Conv2DMaxPool", "Dense", "Products", "recomputed"]
