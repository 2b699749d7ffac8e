"""Composes a run of its parts: each is imported here, within the `if` that says that the run has it."""
