"""The names of `engine.tables`, for programs that import them from here."""

from ...tables import SHARED_ROW_KEY, Embedding, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "uniform", "zeros"]
