"""Layers of models sharded over a mesh of replicas, data x model. Runs on the replica."""

from ..mesh.layout import Mesh, current_mesh
from .attention import Attention
from .layers import Dense, Dropout, Embedding, RMSNorm, cross_entropy

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]
