"""Caches a directory's checkpoints: each manifest is parsed once, each file hashed once.

A file that is unchanged, by inode, size and time of change, is not read again: a run that keeps a thousand checkpoints
would otherwise parse them all at each save, and a reader that polls for new ones would hash all known ones.
"""

import contextlib
import dataclasses
import os

from ..errors import CheckpointError
from . import manifest as manifests
from .manifest import Manifest

_REPEATED = ("about", "variables", "versions")


class Catalogue:
    """The checkpoints of one directory. Reads only; any number may read one directory."""

    def __init__(self, directory: str):
        self.directory = directory
        self._manifests = _FileCache()
        self._hashes = _FileCache()
        self._last: Manifest | None = None

    def read_all(self) -> tuple[list[Manifest], dict[int, str]]:
        """Reads all manifests, as `manifest.read_all`."""
        contents = manifests.read_all(self.directory, self._read)
        self._manifests.drop_removed()
        self._hashes.drop_removed()
        return contents

    def serial_now(self, manifest: Manifest) -> int | None:
        """Returns the serial of the checkpoint that has this one's name now: another if that was replaced."""
        with contextlib.suppress(CheckpointError):
            return self._read(manifest.path).serial
        return None

    def problem(self, manifest: Manifest) -> str | None:
        """Returns how a checkpoint's files differ from its manifest, contents included; None if they match."""
        return manifest.problem(hashed=lambda path: self._hashes.get(path, lambda: manifests.sha256(path)))

    def _read(self, path: str) -> Manifest:
        return self._manifests.get(path, lambda: self._with_last_values(manifests.read(path)))

    def _with_last_values(self, manifest: Manifest) -> Manifest:
        """Replaces values by the last manifest's that equal them: most do, and a thousand copies would take memory."""
        last = self._last or manifest
        equal = {name: getattr(last, name) for name in _REPEATED if getattr(last, name) == getattr(manifest, name)}
        self._last = dataclasses.replace(manifest, **equal)
        return self._last


class _FileCache:
    """Values made from files, cached while the files stay unchanged."""

    def __init__(self):
        self._made = {}

    def get(self, path: str, make):
        """Returns the result of `make()`, cached while the file is unchanged; raises its exceptions, and OSError."""
        if (identity := _identity(path)) is None:
            return make()  # raises the problem
        cached = self._made.get(path)
        if cached is None or cached[0] != identity:
            cached = self._made[path] = (identity, make())
        return cached[1]

    def drop_removed(self) -> None:
        """Drops the values of files that no longer exist."""
        for path in [path for path in list(self._made) if _identity(path) is None]:
            self._made.pop(path, None)


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
