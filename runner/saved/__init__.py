"""A run on disk: its checkpoints, weights, model and preprocessing, read again. Runs on the host."""
