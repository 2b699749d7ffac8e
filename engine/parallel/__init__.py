"""Models that are cut over a mesh of replicas, data x model: which replica holds what, the layers, the collectives."""

from importlib import import_module

# Imported on first use: layers import a step's context, which imports the mesh.
_HOMES = {
    "Attention": "crankshaft.engine.parallel.attention",
    "Dense": "crankshaft.engine.parallel.layers",
    "Dropout": "crankshaft.engine.parallel.layers",
    "Embedding": "crankshaft.engine.parallel.layers",
    "Mesh": "crankshaft.engine.parallel.mesh",
    "RMSNorm": "crankshaft.engine.parallel.layers",
    "cross_entropy": "crankshaft.engine.parallel.losses",
    "current_mesh": "crankshaft.engine.parallel.mesh",
}

__all__ = ["Attention", "Dense", "Dropout", "Embedding", "Mesh", "RMSNorm", "cross_entropy", "current_mesh"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
