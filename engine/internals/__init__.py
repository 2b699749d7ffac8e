"""What lies under TensorFlow's and Keras's public names: variables, graphs, the text of an error."""
