"""Modes of a run: evaluate, predict, generate, export, and the evaluator beside a run. Runs on the host."""
