"""Requests of `crankshaft ask` to a running job, and the hook that answers them. Runs on the host."""
