"""Checkpoints of everything that a run needs to go on."""

from .graph import Part
from .manifest import CheckpointError, Manifest
from .shares import Writer
from .store import Checkpoints
from .weights import load_weights

__all__ = ["CheckpointError", "Checkpoints", "Manifest", "Part", "Writer", "load_weights"]
