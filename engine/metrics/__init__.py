"""Metrics as (total, count) pairs, which merge exactly across uneven batches, replicas and workers."""
