"""Requests of `crankshaft ask`, and the hook that answers them. Runs on the host."""
