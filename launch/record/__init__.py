"""What a run writes to its record. Runs on the host."""
