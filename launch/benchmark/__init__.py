"""Benchmark mode: measurements, comparisons and reports."""
