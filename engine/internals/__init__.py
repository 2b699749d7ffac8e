"""TensorFlow's and Keras's private functions; below their public names: variables, graphs, an error's text."""
