"""Compiled Keras models as Trainers: loss, metrics, own steps, callbacks. Steps and metrics are replica code."""
