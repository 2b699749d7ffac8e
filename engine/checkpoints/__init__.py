"""Checkpoints of everything that a run needs to go on."""

from engine.checkpoints.manifest import CheckpointError, Manifest
from engine.checkpoints.store import Checkpoints, load_weights

__all__ = ["CheckpointError", "Checkpoints", "Manifest", "load_weights"]
