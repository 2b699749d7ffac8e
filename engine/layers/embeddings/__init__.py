"""Sharded embedding tables, looked up by ids."""

from .tables import Embedding, shards_in, uniform, zeros

__all__ = ["Embedding", "shards_in", "uniform", "zeros"]
