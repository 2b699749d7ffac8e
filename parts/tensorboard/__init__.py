"""TensorBoard's view of a run. Runs on the host, but computes gradients and histograms on the replica."""

from .hook import TensorBoard

__all__ = ["TensorBoard"]
