"""Metrics as (total, count) pairs: values that merge, so they are exact on uneven batches, whoever counted what."""
