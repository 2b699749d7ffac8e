"""The names of `engine.sharding`, for programs that import them from here."""

from ...sharding import Attention, Dense, Dropout, Embedding, Mesh, RMSNorm, cross_entropy, current_mesh

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]
