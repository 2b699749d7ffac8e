"""The reduction of gradients across replicas: exact sums, or local SGD's periodic sync."""

from .reduction import Reduction

__all__ = ["Reduction"]
