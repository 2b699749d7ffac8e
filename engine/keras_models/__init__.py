"""Compiled Keras models as Trainers: their loss, metrics and callbacks."""
