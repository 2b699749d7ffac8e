"""A run's data: loaded, checked and entered, written as shards. Runs on the host."""
