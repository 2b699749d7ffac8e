"""The process that a run lives in: its start, signals, locks, files, and how its errors are reported. Host code."""
