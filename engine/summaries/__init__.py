"""What TensorBoard shows of a run."""

from crankshaft.engine.summaries.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
