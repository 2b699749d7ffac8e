"""`crankshaft ask`, and how a run answers it. Runs on the host."""
