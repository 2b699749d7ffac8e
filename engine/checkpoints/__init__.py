"""Checkpoints of everything that a run needs to go on."""

from crankshaft.engine.checkpoints.manifest import CheckpointError, Manifest
from crankshaft.engine.checkpoints.shares import Writer
from crankshaft.engine.checkpoints.store import Checkpoints
from crankshaft.engine.checkpoints.weights import load_weights

__all__ = ["CheckpointError", "Checkpoints", "Manifest", "Writer", "load_weights"]
