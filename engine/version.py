"""The version of this package, as setup.cfg has it. Runs on the host; needs no TensorFlow."""

__version__ = "0.1.0"
