"""Starts and supervises tasks: `crankshaft local`, and the agent of a run with `max_restarts`. Runs on the host."""
