"""The process that a run lives in: its start, signals, locks and files, and the report of errors. Runs on the host."""
