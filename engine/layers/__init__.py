"""Layers for models: Keras's with less work on CPUs; in a separate room, embedding tables cut into shards."""

from crankshaft.engine.layers.keras_layers import BatchNormalization, Conv2DMaxPool, Dense

__all__ = ["BatchNormalization", "Conv2DMaxPool", "Dense"]
