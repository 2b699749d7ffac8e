"""TensorFlow's and Keras's private functions, behind public names. Runs on the host, but for "Replica code"."""

from .supported import refuse_other_libraries

refuse_other_libraries()

from .patches import patch_libraries  # noqa: E402  after what older libraries would fail in

patch_libraries()
