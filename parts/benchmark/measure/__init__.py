"""Benchmark mode's measurements: timing, and the figures computed from the times. Runs on the host."""
