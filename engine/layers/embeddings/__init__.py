"""Sharded embedding tables, looked up by ids."""

from .admission import SHARED_ROW_KEY
from .tables import Embedding, shards_in, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "shards_in", "uniform", "zeros"]
