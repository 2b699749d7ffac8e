"""One run: put together from a configuration, on its data, and what its mode does with it. Runs on the host."""
