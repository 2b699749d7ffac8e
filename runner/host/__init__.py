"""The process that a run lives in: its start and end, signals, shared state, lock and files. Runs on the host."""
