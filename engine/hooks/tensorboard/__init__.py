"""TensorBoard's view of a run."""

from .hook import TensorBoard

__all__ = ["TensorBoard"]
