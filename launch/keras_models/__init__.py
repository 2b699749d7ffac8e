"""What a process keeps of a compiled Keras model between its runs. Runs on the host."""
