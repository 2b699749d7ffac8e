"""TensorFlow's and Keras's private functions, behind public names: variables, graphs, pipelines."""
