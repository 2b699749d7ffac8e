"""Where examples come from, and in which order they reach the replicas."""
