"""Benchmark mode: what it measures, how it compares, what it prints."""
