"""Sharded embedding tables: lookups run on the replica; rows are made, freed, saved and exported on the host."""

from .admission import SHARED_ROW_KEY
from .tables import Embedding, uniform, zeros

__all__ = ["SHARED_ROW_KEY", "Embedding", "uniform", "zeros"]
