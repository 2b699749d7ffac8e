"""What TensorBoard shows of a run."""

from .hook import TensorBoard

__all__ = ["TensorBoard"]
