"""Tables of rows found by ids, cut into shards."""

from crankshaft.engine.layers.embeddings.tables import Embedding, none_admitted, normal, shards_in, uniform, zeros

__all__ = ["Embedding", "none_admitted", "normal", "shards_in", "uniform", "zeros"]
