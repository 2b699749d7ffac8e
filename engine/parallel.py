"""The former path of `crankshaft.engine.layers.parallel`, which goes on to import."""

from .layers.parallel import Attention, Dense, Dropout, Embedding, Mesh, RMSNorm, cross_entropy, current_mesh

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]
