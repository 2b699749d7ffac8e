"""Tables of rows found by ids, in shards."""

from .tables import Embedding, shards_in, uniform, zeros

__all__ = ["Embedding", "shards_in", "uniform", "zeros"]
