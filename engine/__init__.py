"""The training engine: loops, strategies, reduction, checkpoints. On the host and in replicas."""
