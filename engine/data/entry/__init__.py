"""Converts what users pass (arrays, datasets, Keras's own, loaders) to sources and streams. Runs on the host."""
