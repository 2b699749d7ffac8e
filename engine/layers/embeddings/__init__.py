"""The names of `engine.tables`, where programs imported them before."""

from ...tables import SHARED_ROW_KEY, Embedding, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "uniform", "zeros"]
