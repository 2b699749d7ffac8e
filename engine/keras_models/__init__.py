"""Compiled Keras models as Trainers: loss, metrics, callbacks. Runs on the host, except steps and metrics' updates."""
