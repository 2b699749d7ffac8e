"""A run whose folder lies on another file system (`--run_dir=gs://bucket/run`): kept here, and copied there.

A run appends, locks and renames, which such file systems do not offer. So it works in a folder of this machine, filled
from the other one as the process begins; what it writes is copied from there about once a second: the list of a
checkpoint's files, the files, and then the list is renamed to the manifest. A process that is killed at any moment
leaves complete checkpoints, and incomplete ones are recognized, as on a local disk. Only what the run removes here is
removed there: if another program (a cleaner of temporary files) has removed a file of its own, the run ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping

from ...engine import logging
from ...engine.checkpoints.manifest import INCOMPLETE, SUFFIX, WRITING
from ...engine.checkpoints.run_dir import NAMES
from ...engine.errors import reason
from ...engine.machine import files
from ...input.files import storage
from ..failures import CrankshaftError, RunError, UsageError
from . import process, startup

_PUSH_SECONDS = 1.0
# What is of this machine alone: locks, files that are not whole yet. Event files are never read again by a run.
_NOT_PUSHED = re.compile(r"\.lock.*|.*\.tmp|.*\.writing|ckpt-\d+_temp\w*")
_NOT_PULLED = (NAMES.tensorboard, NAMES.logs, NAMES.export)
_NEEDED = (NAMES.config, NAMES.model, NAMES.events, NAMES.checkpoints, NAMES.best)  # by a run that goes on
_FIX = "see that it is there and that this machine may write to it, or use another run_dir"


def remote_folder(run_dir: str | None, elsewhere: Mapping[str, str | None] | None = None) -> RemoteFolder | None:
    """Copies the folder of a run that lies on a file system which only `tf.io.gfile` reaches; None of another.

    `elsewhere`: see `RemoteFolder`; paths that are not URLs have no effect.
    """
    return RemoteFolder(run_dir, elsewhere) if run_dir and re.match(r"[a-z][a-z0-9]*://", run_dir) else None


class RemoteFolder:
    """A run's folder elsewhere, and its copy in a temporary folder, which goes with this object.

    Args:
      url: URL of the folder, which need not exist.
      elsewhere: URLs of the folders to which some of the run's own are copied, by their names in it.

    Attributes:
      url: URL of the folder, without a slash at its end.
      folder: path of the copy on this machine.

    Raises:
      UsageError: it can't be read.
    """

    def __init__(self, url: str, elsewhere: Mapping[str, str | None] | None = None):
        process.prepare(tunes_allocator=False)  # before TensorFlow starts
        startup.import_tensorflow()
        self.url = url.rstrip("/")
        self._urls = {name: path.rstrip("/") for name, path in (elsewhere or {}).items() if path and "://" in path}
        # One process after another of a run that is killed would fill the disk.
        name = f"crankshaft-run-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}"
        self.folder, lock = files.locked_folder(name)
        self._remove = weakref.finalize(self, _remove, self.folder, lock)
        # (size, time of change) by path within the folder, of files that are there, and that the run has removed here
        self._pushed: dict[str, tuple[int, int] | None] = {}
        self._removed: dict[str, tuple[int, int] | None] = {}
        with _explained(UsageError, f"run_dir={url} can't be read"):
            storage.retried(url, self._pull)

    def _pull(self) -> None:
        gfile = storage.gfile(self.url)
        if not gfile.exists(self.url) or not gfile.isdir(self.url):
            return
        for folder, _, names in gfile.walk(self.url):
            inner = folder[len(self.url) :].strip("/")
            for path in (os.path.join(inner, name) for name in ("", *names)):
                if os.pardir in path.split("/") or os.path.isabs(path):  # objects of a bucket have any names
                    raise UsageError(
                        f"run_dir={self.url} lists {path}, whose copy would not be below that of the folder; remove it"
                    )
            if inner.split("/")[0] in _NOT_PULLED:
                continue
            os.makedirs(os.path.join(self.folder, inner), exist_ok=True)
            for name in names:
                path = os.path.join(inner, name)
                gfile.copy(f"{self.url}/{path}", os.path.join(self.folder, path), overwrite=True)
                # What a killed process has left there of a copy goes with the first push.
                (self._removed if _NOT_PUSHED.fullmatch(name) else self._pushed)[path] = self._state(path)

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """Copies new files from a thread, and the rest at the end. Raises `RunError` if that fails."""
        with _explained(UsageError, f"run_dir={self.url} can't be written"):
            storage.retried(self.url, lambda: storage.gfile(self.url).makedirs(self.url))
        ended = threading.Event()
        thread = threading.Thread(target=self._push_until, args=(ended,), name="crankshaft-push", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.check()
            try:
                with _explained(RunError, f"the run's files can't be copied to run_dir={self.url}"):
                    self.push()
            except RunError as error:
                self._remove.detach()  # nothing is lost, by its name not in a later process either
                os.rename(self.folder, kept := f"{self.folder}.kept")
                raise RunError(f"{error.message}; its files are in {kept}") from None

    def _push_until(self, ended: threading.Event) -> None:
        warned = False
        while not ended.wait(_PUSH_SECONDS):
            try:
                self.push()
                warned = False
            except RunError as error:
                logging.warning("%s", error)
                return
            except Exception as error:  # of TensorFlow's file systems; tried again
                if not warned:
                    logging.warning("run_dir=%s can't be written now (%s); tried again", self.url, reason(error))
                warned = True

    def removing(self, path: str) -> None:
        """Notes that the run is about to remove a file here, for the next push. Called in any thread."""
        inner = os.path.relpath(path, self.folder)
        self._removed[inner] = self._state(inner)

    def check(self) -> None:
        """Raises `RunError` if files are gone here that a run needs and has not removed. Called in any thread."""
        if lost := [path for path in [*self._pushed] if self._is_lost(path)]:
            more = f" and {len(lost) - 1:,} more" if lost[1:] else ""
            raise RunError(
                f"run_dir={self.url}: another program has removed {lost[0]}{more} from its copy, {self.folder}; set "
                "TMPDIR to a folder that nothing cleans, and start again: the run goes on from run_dir, which has them"
            )

    def _is_lost(self, path: str) -> bool:
        is_here = self._state(path) is not None  # looked at first: the run notes what it removes before it does
        return not is_here and path.split(os.sep)[0] in _NEEDED and path not in self._removed

    def push(self) -> None:
        """Copies each file that has changed since it was copied last, and removes those that the run has removed.

        Raises `RunError`, and changes nothing, if others are gone here.
        """
        self.check()
        states = {path: state for path in self._paths() if (state := self._state(path))}
        sealed = {path.removesuffix(SUFFIX) for path in states if path.endswith(SUFFIX)}
        changed = [path for path in states if _is_whole(path, sealed) and self._pushed.get(path) != states[path]]
        # As a run writes a checkpoint here: its list, the files, and then the list's new name makes it valid.
        lists = [path for path in changed if path.endswith(SUFFIX) and self._copy(path, path + WRITING)]
        for path in changed:
            if not path.endswith(SUFFIX):
                self._copy(path, path)
        for path in lists:
            storage.gfile(self.url).rename(f"{self.url}/{path}{WRITING}", f"{self.url}/{path}", overwrite=True)
        self._pushed.update((path, states[path]) for path in changed)
        for path in sorted([*self._removed], key=lambda path: path.endswith(SUFFIX)):  # a file without one is nobody's
            if path not in states:
                if storage.gfile(self.url).exists(f"{self.url}/{path}"):
                    storage.gfile(self.url).remove(f"{self.url}/{path}")
                self._pushed.pop(path, None)
            elif self._state(path) in (None, self._removed[path]):
                continue  # for the next push; else it was removed before, and this is a new one of its name
            del self._removed[path]

    def _copy(self, path: str, to: str) -> bool:
        """Copies a file there, under a path within the folder; returns whether it was still here."""
        folder, _, inner = to.partition(os.sep)
        target = f"{self._urls[folder]}/{inner}" if folder in self._urls else f"{self.url}/{to}"
        gfile = storage.gfile(target)
        gfile.makedirs(os.path.dirname(target))
        try:
            gfile.copy(os.path.join(self.folder, path), f"{target}.tmp", overwrite=True)
        except Exception:
            # The run removes old checkpoints meanwhile.
            if self._state(path) is None and not self._is_lost(path):
                return False
            raise
        gfile.rename(f"{target}.tmp", target, overwrite=True)
        return True

    def _paths(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not _NOT_PUSHED.fullmatch(name)]
            inner = os.path.relpath(folder, self.folder)
            yield from (
                os.path.normpath(os.path.join(inner, name)) for name in names if not _NOT_PUSHED.fullmatch(name)
            )

    def _state(self, path: str) -> tuple[int, int] | None:
        try:
            status = os.stat(os.path.join(self.folder, path))
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns


def _remove(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _is_whole(path: str, sealed: set[str]) -> bool:
    """Whether a file may be copied: of a checkpoint only when its manifest, the last of it, is there; or set aside."""
    stem = re.match(r"(.*ckpt-\d+)\.", path)
    return stem is None or stem[1] in sealed or INCOMPLETE in path.split(os.sep)


@contextlib.contextmanager
def _explained(kind: type[Exception], action: str) -> Iterator[None]:
    try:
        yield
    except CrankshaftError:
        raise
    except Exception as error:  # TensorFlow's, by file system
        raise kind(f"{action} ({reason(error)}); {_FIX}") from None
