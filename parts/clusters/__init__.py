"""The tasks of a cluster: found, awaited, and known to each other. Runs on the host."""
