"""What TensorBoard shows of a run."""

from crankshaft.engine.hooks.tensorboard.hook import TensorBoard

__all__ = ["TensorBoard"]
