"""Which modules and files are Crankshaft's own, by how their names begin. Runs on the host; needs no TensorFlow."""

from __future__ import annotations

import os

_PACKAGE = __name__.partition(".")[0]


def _modules(*folders: str) -> tuple[str, ...]:
    return tuple(f"{_PACKAGE}.{folder}." for folder in folders)


def _files(*folders: str) -> tuple[str, ...]:
    return tuple(os.path.join(ROOT, folder, "") for folder in folders)


# As frames name it, which modules without their source files take from where they were compiled.
ROOT = os.path.join(os.path.dirname(os.path.dirname(_files.__code__.co_filename)), "")
_COMPUTING = ("engine", "parts")  # what makes and holds tensors
_OWN = (*_COMPUTING, "launch", "runner")
COMPUTING_MODULES, COMPUTING_FILES = _modules(*_COMPUTING), _files(*_COMPUTING)
OWN_MODULES, OWN_FILES = _modules(*_OWN), (*_files(*_OWN), f"{ROOT}__init__.py", f"{ROOT}__main__.py")
# Models and inputs are written as a user's are: the line of a mistake in one is what a user looks for.
FILES_LIKE_USERS = _files("input", "models")
