"""Tables of rows found by ids, cut into shards."""

from .tables import Embedding, normal, shards_in, uniform, zeros

__all__ = ["Embedding", "normal", "shards_in", "uniform", "zeros"]
