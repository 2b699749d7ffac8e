"""Sharded embedding tables. Lookups run on the replica; making tables, freeing and saving rows, on the host."""

from .admission import SHARED_ROW_KEY
from .tables import Embedding, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "uniform", "zeros"]
