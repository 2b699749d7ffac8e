"""What TensorBoard shows of a run."""

from engine.summaries.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
