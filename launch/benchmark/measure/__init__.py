"""Benchmark mode's measurements: what is timed, and what the times say. Host code."""
