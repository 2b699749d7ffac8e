"""Compiled Keras models as Trainers: loss, metrics, own steps, callbacks. Made on the host; steps are replica code."""
