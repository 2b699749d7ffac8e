"""Snapshots of a run's state in memory, for a failure between two checkpoints. Runs on the host."""
