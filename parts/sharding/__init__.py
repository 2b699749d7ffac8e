"""Models and optimizers sharded over a mesh: layers, sums, updates. Made on the host; steps are replica code."""

from ...engine.mesh.layout import current_mesh
from .attention import Attention
from .layers import Dense, Dropout, Embedding, Normal, RMSNorm, add_weight, cross_entropy
from .mesh import ShardedMesh as Mesh

__all__ = [
    "Attention",
    "Dense",
    "Dropout",
    "Embedding",
    "Mesh",
    "Normal",
    "RMSNorm",
    "add_weight",
    "cross_entropy",
    "current_mesh",
]
