"""What replicas tell each other of a step: sums as they are, as two thin matrices, or only now and then."""

from crankshaft.engine.reduction.all_reduce import Reduction

__all__ = ["Reduction"]
