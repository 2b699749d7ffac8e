"""Checkpoints of everything that a run needs to go on."""

from crankshaft.engine.checkpoints.manifest import CheckpointError, Manifest
from crankshaft.engine.checkpoints.store import Checkpoints, load_weights

__all__ = ["CheckpointError", "Checkpoints", "Manifest", "load_weights"]
