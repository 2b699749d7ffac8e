"""The process that a run lives in: its start, signals, locks and files, and how its errors are said. Host code."""
