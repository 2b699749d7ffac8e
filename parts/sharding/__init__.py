"""Models and optimizers sharded over a mesh: layers, sums of gradients, updates in shards. Runs on the replica."""

from ...engine.mesh.layout import current_mesh
from .attention import Attention
from .layers import Dense, Dropout, Embedding, RMSNorm, cross_entropy
from .mesh import ShardedMesh as Mesh

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]
