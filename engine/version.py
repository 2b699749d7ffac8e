"""The version of this package, as setup.cfg has it. Needs no TensorFlow."""

__version__ = "0.1.0"
