"""Snapshots of a state in memory, its own or its parent's, between two checkpoints. Runs on the host."""
