"""Makes the hook that writes a run's record. Runs on the host."""
