"""Command lines and processes: the only code that reads flags and the environment. Host code."""
