"""Metrics as (total, count) pairs, which merge exactly. Computed in replica code, merged and read on the host."""
