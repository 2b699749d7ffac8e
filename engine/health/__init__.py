"""The health of a run's processes: who is lost, stuck or slow. Runs on the host."""
