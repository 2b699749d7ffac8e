"""What lies under TensorFlow's and Keras's public names: variables, graphs, the words of an error."""
