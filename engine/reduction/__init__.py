"""Sums gradients across replicas, or syncs local SGD. Replica code, except `per_replica` and `build`, the host's."""

from .all_reduce import Reduction

__all__ = ["Reduction"]
