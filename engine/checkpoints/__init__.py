"""Checkpoints of everything that a run needs to go on."""

from .manifest import CheckpointError, Manifest
from .shares import Writer
from .store import Checkpoints
from .weights import load_weights

__all__ = ["CheckpointError", "Checkpoints", "Manifest", "Writer", "load_weights"]
