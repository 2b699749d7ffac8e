"""The training engine: loops, strategies, reduction and checkpoints, on the host and in replicas."""
