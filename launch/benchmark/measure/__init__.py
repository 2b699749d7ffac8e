"""Benchmark mode's measurements: what is timed, and the figures from the times. Host code."""
