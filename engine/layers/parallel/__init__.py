"""The names of `engine.sharding`, where programs imported them before."""

from ...sharding import Attention, Dense, Dropout, Embedding, Mesh, RMSNorm, cross_entropy, current_mesh

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]
