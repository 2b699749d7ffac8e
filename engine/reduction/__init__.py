"""The reduction of gradients across replicas: exact sums, or local SGD. Runs on the replica, except `per_replica`."""

from .reduction import Reduction

__all__ = ["Reduction"]
