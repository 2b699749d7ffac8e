"""Sharded embedding tables: lookups and new ids' rows run on the replica, freeing, saving and exporting on the host."""

from .admission import SHARED_ROW_KEY
from .tables import Embedding, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "uniform", "zeros"]
