"""The modes of a run but training: evaluate, predict, generate and export. Runs on the host."""
