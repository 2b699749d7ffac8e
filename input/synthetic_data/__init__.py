"""Synthetic data: a function of a seed, from a planted truth. Runs on the host."""
