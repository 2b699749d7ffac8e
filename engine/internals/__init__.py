"""TensorFlow's and Keras's private functions, behind public names. Runs on the host, but for "Replica code"."""

from .patches import patch_libraries

patch_libraries()
