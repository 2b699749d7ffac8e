"""A run's start: its trainer with variables, checkpoints restored, weights from elsewhere. Runs on the host."""
