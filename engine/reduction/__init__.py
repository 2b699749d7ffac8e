"""The reduction of gradients across replicas: exact sums, or local SGD. Runs on the replica, except `per_replica`."""

from .all_reduce import Reduction

__all__ = ["Reduction"]
