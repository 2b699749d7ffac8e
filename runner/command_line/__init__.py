"""From a command line to a checked configuration. Nothing here starts TensorFlow. Runs on the host."""
