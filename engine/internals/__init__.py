"""TensorFlow's and Keras's private functions, by purpose. Runs on the host, except what says "Replica code"."""

from .supported import refuse_other_libraries

refuse_other_libraries()

from .patches import patch_libraries  # noqa: E402  after what older libraries would fail in

patch_libraries()
