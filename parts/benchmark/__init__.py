"""Benchmark mode: measurements, comparisons and reports. Runs on the host."""
