"""Metrics as (total, count) pairs, computed on the replica. They merge exactly, for uneven batches too, on the host."""
