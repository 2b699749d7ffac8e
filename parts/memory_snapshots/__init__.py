"""Snapshots of a run's state in memory, its own or its parent's, for a failure between two checkpoints. Host."""
