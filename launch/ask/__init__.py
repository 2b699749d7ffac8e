"""`crankshaft ask`, and what it is told of a run. Runs on the host."""
