"""Checkpoints of everything that a run needs to continue. Runs on the host.

Names are imported on first use: manifests and `RunDir` are read before TensorFlow is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manifest import Manifest
    from .objects import Matching
    from .run_dir import RunDir
    from .shares import WritingProcess
    from .store import Checkpoints
    from .warm_start import load_weights, read_newest

_HOMES = {
    "Checkpoints": "store",
    "Manifest": "manifest",
    "Matching": "objects",
    "RunDir": "run_dir",
    "WritingProcess": "shares",
    "load_weights": "warm_start",
    "read_newest": "warm_start",
}

__all__ = ["Checkpoints", "Manifest", "Matching", "RunDir", "WritingProcess", "load_weights", "read_newest"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
