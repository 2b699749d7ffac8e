"""One run: its data, its files, and what its mode does with it. Runs on the host."""
