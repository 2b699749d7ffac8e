"""Composes a run of its parts, each imported within the `if` that says that the run has it. Runs on the host."""
