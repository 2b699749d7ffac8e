"""Checkpoints of everything a run needs to continue: written beside training, verified, kept, restored.

The order of writing makes a kill at any moment harmless: TensorFlow's files are written to a folder of their own, then
a list of them; the files are moved to the directory; then the list is renamed to the manifest. The oldest checkpoints
are removed before that as long as two others stay, so that with `keep=3` or more the disk never holds more than `keep`,
and the system reuses the removed files' memory; the rest are removed after it. Only the manifests decide what exists
and what may be removed: TensorFlow's `checkpoint` file, which a killed process leaves stale, is written again from them
at each save and not read here.

Saving is asynchronous, by a snapshot and a thread. TensorFlow's way,
`CheckpointOptions(experimental_enable_async_checkpoint=True)`, does not work with Keras 3 variables: its second save
fails (`Variable._copy_trackable_to_cpu` makes variables inside a `tf.function`). It also keeps a second copy of the
state permanently, misses variables made after the first save, and reports a failed write only at the next save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from .. import logging
from ..errors import CheckpointError, SaveError, reason
from ..machine import environment, files
from . import manifest as manifests
from . import objects, shares, slices, snapshot
from .catalogue import Catalogue
from .manifest import Manifest
from .objects import Matching
from .shares import WritingProcess
from .slices import SlicedVariable

T = TypeVar("T")
# Writing and hashing keep a core busy; a training step that shares its core waits for its slower half.
_NICENESS = 15
# Kept besides the one being written: if the newest turns out to be broken, one is left.
_LEFT_WHILE_WRITING = 2
_FOLDER = re.compile(r"ckpt-\d+_temp_\w+_\d+")  # temporary folder of one save
_MARK = ".crankshaft"  # file created first in it: the folder is this program's
_LISTED = 4
# For a reader beside a run: how often it starts over, and how long it waits for files that are being moved.
_MOST_READS = 100
_MOVING_SECONDS, _LOOK_SECONDS = 5.0, 0.02


@dataclasses.dataclass(frozen=True)
class _Saving:
    """One checkpoint that is being written.

    Attributes:
      folder: the save's temporary folder, shared by all processes that write it.
      may_change: set once nothing is read from variables any more.
      done: set once it is written, has failed, or has given way to a newer one.
      after: another's `done`, which has to be set before this is written; None without one.
    """

    step: int
    folder: str
    entries: list[SlicedVariable]
    others: frozenset[int]
    record: dict
    may_change: threading.Event = dataclasses.field(default_factory=threading.Event)
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    after: threading.Event | None = None


class Checkpoints:
    """The checkpoints of one state in one directory on a file system that renames atomically.

    One object writes at a time; any number, in any process, may read. Reading changes nothing on the disk. `keep` is
    how many of the newest stay; None or 0 keeps all. `about` is written to every manifest: model, input,
    configuration, anything that `json` takes.

    If several processes train one state, all call the same methods: the first one seals checkpoints, and the others
    write only their shards of variables (`parts.sharding.shards`), into the same directory.

    Args:
      check: raises if the run has lost its folder. Called before each save, and before it is written, in any thread.
      overtakes: whether a save waits for no earlier one: one that has not begun to be written gives way to it. Only
        saves of one process do.
      after: other checkpoints of the run: what was saved there before a save here is on the disk before it.
      removing: called with the path of each file that this object is about to remove, or to move, in any thread.

    Attributes:
      written: called in the writing thread when a checkpoint is complete, with its manifest and the seconds it took.
    """

    def __init__(
        self,
        directory,
        state: tf.train.Checkpoint,
        *,
        keep: int | None,
        about: dict,
        writes: bool = True,
        writer: WritingProcess | None = None,
        check: Callable[[], None] = lambda: None,
        overtakes: bool = False,
        after: Checkpoints | None = None,
        removing: Callable[[str], None] = lambda path: None,
    ):
        self.check, self._removing = check, removing
        self.directory = os.path.abspath(directory)
        self.writes = writes
        self.writer = writer or WritingProcess()
        self._saves = 0
        self.state = state
        self.keep = keep or None
        self.about = about
        self._overtakes, self._after = overtakes, after
        self._handover = threading.Lock()  # held while the thread, or a save, decides what is written next
        self._is_writing = False
        self._next: _Saving | None = None  # to be written once the thread has written what it does now
        self._newest_done: threading.Event | None = None  # the newest save's
        self._thread: threading.Thread | None = None
        self._error: SaveError | None = None  # why the newest save failed
        self._failed_step: int | None = None  # the first one since a checkpoint was written
        self._begun_step: int | None = None  # that this object began to save, or restored, last; as in all processes
        self._current_step: int | None = None  # step of its last complete one
        self._writing = threading.Lock()
        self._warned: set[str] = set()
        self.written: Callable[[Manifest, float], None] = lambda manifest, seconds: None
        self._catalogue = Catalogue(self.directory)

    def clean(self) -> list[str]:
        """Removes what killed writers left, and returns the names. Called by the writing process before its first save.

        A checkpoint that lacked only its manifest is sealed. One with a manifest stays, broken or not, until it is
        written again or removed by `keep`. Of a copy that was interrupted, files without a manifest, newer than a whole
        checkpoint, are moved to the folder `INCOMPLETE`.

        Raises:
          CheckpointError: the directory has other checkpoint files that no manifest lists.
        """
        self.wait()
        if not self.writes or self.writer.process:
            return []
        removed = manifests.finish_interrupted_writes(self.directory, self._remove)
        names = manifests.listdir(self.directory)
        removed += [name for name in names if _FOLDER.fullmatch(name) and _discard(os.path.join(self.directory, name))]
        if names := manifests.unlisted_files(self.directory):
            self._set_aside(names)
        listed = self._catalogue.read_all()[0]
        swept = [os.path.basename(manifest.path) for manifest in listed if manifest.gone()]
        if len(swept) < len(listed):  # else keep the last trace of a run
            removed += [name for name in swept if self._remove(os.path.join(self.directory, name))]
        for name in removed:
            logging.info("removed %s, left by a process that was killed", name)
        return removed

    def _set_aside(self, names: list[str]) -> None:
        """Moves files that no manifest lists, if all are newer than a whole checkpoint, or raises `CheckpointError`."""
        whole = next(self._valid(lambda manifest: True), None)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        listed = ", ".join(names[:_LISTED]) + more
        if whole is None or not all(manifests.is_file_after(name, whole.step) for name in names):
            raise CheckpointError(
                f"{self.directory} has checkpoint files that no manifest lists: {listed}; restore their .manifest.json "
                "files from a copy, move them elsewhere, or use another run_dir, with init_from to begin with their "
                "weights"
            )
        folder = os.path.join(self.directory, manifests.INCOMPLETE)
        os.makedirs(folder, exist_ok=True)
        size = sum(os.path.getsize(os.path.join(self.directory, name)) for name in names)
        for name in names:
            target = os.path.join(folder, name)
            while os.path.lexists(target):
                target += "~"
            self._removing(path := os.path.join(self.directory, name))
            os.rename(path, target)
        message = "%s: no manifest lists %s, newer than %s, as if copied in part: moved to %s (%.1f MiB)"
        logging.warning(message, self.directory, listed, whole.name, folder, size / 2**20)

    def save(self, step: int, host_state: dict, *, wait: bool = False, force: bool = False) -> None:
        """Saves the current state; returns when the variables may change again.

        Does nothing if this object's last save or restore was of the same step, unless `force`. Waits for the previous
        save, unless it overtakes that; if that failed, which is logged, this one replaces it: a full disk may have
        space again. `host_state`, plain JSON and NumPy scalars, is read at once and written to the manifest.

        Raises:
          SaveError: with `wait`, if it could not be written.
        """
        if not self._overtakes:
            self.join()
        if step == self._begun_step and not force:
            return
        self.check()
        # Set before anything can fail: a save that failed is not tried again at the same step, but at the next.
        self._begun_step, self._error = step, None
        record = manifests.as_read(self.about, host_state)
        entries, variables = snapshot.take(self.state)  # gathers what differs by replica, on all processes
        own_entries = [entry for entry in entries if self.writer.process in entry.writers]
        # Each process writes the entries that it alone has or that were assigned to it; the first one waits for all of
        # these.
        others = frozenset().union(*(entry.writers for entry in entries)) - {0}
        saving = self._new(step, own_entries, others, {**record, "variables": variables})
        if not self.writes or not own_entries:
            self._current_step = step
            return
        self._start(saving)
        if wait:
            self.wait()

    def write(self, step: int, entries: list[SlicedVariable], others: frozenset[int], record: dict) -> None:
        """Writes a state that was read earlier, as a checkpoint, and waits until it is on the disk.

        Every process calls it, also one without entries; the first one waits for the shares of `others`.

        Args:
          record: the record of the state, for the manifest: about, host_state, variables.

        Raises:
          SaveError: it can't be written. The log has a failure of the previous save.
        """
        self.join()
        self.check()
        self._error = None
        saving = self._new(step, entries, others, record)
        if entries or not self.writer.process:
            self._start(saving)
            self.wait()

    def write_beside(self, step: int, entries: list[SlicedVariable], record: dict) -> None:
        """Writes a state like `write`, but alone, in a thread beside the run; the log has a failure.

        Does nothing if the run has written this step or a later one by the time it is this thread's turn.
        """
        folder = os.path.join(self.directory, f"ckpt-{step}_temp_{uuid.uuid4().hex}_0")
        saving = _Saving(int(step), folder, entries, frozenset(), record)
        self._write(saving, lambda: step > manifests.newest_step(self.directory))

    def _new(self, step: int, entries: list[SlicedVariable], others: frozenset[int], record: dict) -> _Saving:
        """Names the folder by what all processes count alike, so that they write to one."""
        self._saves += 1
        folder = os.path.join(self.directory, f"ckpt-{step}_temp_{self.writer.attempt}_{self._saves}")
        after = self._after._newest_done if self._after else None
        return _Saving(int(step), folder, entries, others, record, after=after)

    def _start(self, saving: _Saving) -> None:
        """Writes in a thread; returns when the variables may change again."""
        # Entries that are read from variables as they are written forbid steps until then; copies do not.
        if not any(entry.is_live for entry in saving.entries):
            saving.may_change.set()
        may_wait = saving.may_change.is_set() and not saving.others and not self.writer.process
        with self._handover:
            self._newest_done = saving.done
            if self._overtakes and may_wait and self._is_writing:
                if self._next:
                    self._next.done.set()
                self._next = saving
                return
        self.join()
        self._is_writing = True
        # Not a daemon: a process that ends, even by an exception, first finishes writing.
        thread = threading.Thread(target=self._write_later, args=(saving,), name=f"checkpoint-{saving.step}")
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the system has no thread left, or the interpreter ends
            self._write(saving)
            self._is_writing = False
        saving.may_change.wait()

    def outdate(self) -> None:
        """Makes the next `save` write, also of a step that was saved: a program has changed the state since."""
        self._begun_step = None

    def join(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Waits until nothing is being written. Raises the newest save's SaveError, once, if it failed."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def latest(self, fits: Callable[[Manifest], bool] = lambda manifest: True) -> Manifest | None:
        """Returns the newest checkpoint for which `fits` holds and whose files match its manifest, or None.

        Warns once of each newer one that is skipped, with the file and the expected and actual value. Looks again
        while another process writes and removes checkpoints.
        """
        # Another process may be between the last rename of a file and that of the manifest: what looks broken is whole
        # in a moment.
        end = time.monotonic() + _MOVING_SECONDS
        while True:
            before = is_moving, _ = self._listed()
            if manifest := next(self._valid(fits), None):
                return manifest
            if is_moving and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
            # Nothing was written or removed while they were verified: there is none to wait for.
            elif self._listed() == before:
                return None

    def _listed(self) -> tuple[bool, list[int]]:
        """Returns whether a checkpoint's files are being moved to the directory, and the serials of all checkpoints."""
        return manifests.is_being_written(self.directory), [
            manifest.serial for manifest in self._catalogue.read_all()[0]
        ]

    def read(self, use: Callable[[Manifest], T], fits: Callable[[Manifest], bool] = lambda manifest: True) -> T | None:
        """Calls `use` with the checkpoint that `latest` returns, and returns its result; None without a checkpoint.

        A run that writes checkpoints also removes and replaces them. If that happens before `use` has read this one,
        `use` is called again with the newer one, and its first result is discarded.

        Raises:
          CheckpointError: a run replaces checkpoints faster than `use` reads them. Also what `use` raises.
        """
        for _ in range(_MOST_READS):
            if (manifest := self.latest(fits)) is None:
                return None
            try:
                result = use(manifest)
            except (tf.errors.OpError, CheckpointError):
                if self._catalogue.problem(manifest) is None:
                    raise
                continue
            # A step that is saved again has files of the same names: what `use` has read may be half of each.
            if self._catalogue.serial_now(manifest) in (None, manifest.serial):
                return result
        raise CheckpointError(
            f"the run that writes to {self.directory} has replaced {_MOST_READS} checkpoints, each before it was read; "
            "keep more of them (keep_checkpoints), or write them less often"
        )

    def all(self, fits: Callable[[Manifest], bool] = lambda manifest: True) -> list[Manifest]:
        """Returns all checkpoints for which `fits` holds and whose files match their manifests, the oldest first."""
        return list(self._valid(fits))[::-1]

    def problem(self) -> str | None:
        """Returns the problem of the newest checkpoint if there are manifests and none is of a valid one; else None."""
        listed, unreadable = self._catalogue.read_all()
        sealed = manifests.steps(self.directory)
        problems: list[str | None] = [unreadable[step] for step in sorted(unreadable) if step in sealed]
        problems += [self._catalogue.problem(manifest) for manifest in listed[::-1]]
        return problems[-1] if problems and all(problems) else None

    def restore(
        self,
        manifest: Manifest | None = None,
        matching: Callable[[Manifest], Matching] = lambda manifest: Matching(),
        allow_changed: bool = False,
    ) -> Manifest | None:
        """Restores the state's variables from a checkpoint, the latest one if None; returns its manifest, or None.

        Args:
          allow_changed: whether optimizer state may differ: what matches is restored, and a warning lists the rest.

        Raises:
          CheckpointError: before any variable is changed, if the checkpoint is broken or of another state: variables
            missing, extra or of another shape or type.
        """

        def restore(verified: Manifest) -> Manifest:
            why_not = (
                f"{verified.name} in {self.directory} is of another model or optimizer; use another run_dir, and load "
                "its weights with init_from, if all fit, or those of layers in build_model, by crankshaft.load_model"
            )
            by_name = matching(verified)
            _, differences = objects.restore(verified.prefix, self.state, why_not, (), by_name, allow_changed)
            if differences and not self.writer.process:
                logging.warning(
                    "%s has other averages or another optimizer state; only what matches is restored: %s",
                    verified.name,
                    differences,
                )
            # A run that ends at the step that it restored writes nothing again.
            self._begun_step = self._current_step = verified.step
            return verified

        self.join()
        if manifest is None:
            return self.read(restore)
        if problem := self._catalogue.problem(manifest):
            raise CheckpointError(f"{problem}, in {self.directory}; restore another checkpoint")
        return restore(manifest)

    def _valid(self, fits: Callable[[Manifest], bool]):
        """Yields valid checkpoints, newest first, and warns of each that is skipped."""
        listed, unreadable = self._catalogue.read_all()
        for manifest in listed:
            if not fits(manifest) or manifest.gone():
                continue  # removed, by this process or another
            problem = self._catalogue.problem(manifest)
            if problem is None:
                self._warn_newer(unreadable, manifest.step)
                yield manifest
            elif not manifest.gone() and self._catalogue.serial_now(manifest) == manifest.serial:
                self._warn(problem)
        self._warn_newer(unreadable, -1)

    def _warn_newer(self, problems: dict[int, str], than_step: int) -> None:
        for step in sorted(problems, reverse=True):
            if step > than_step:
                self._warn(problems[step])

    def _warn(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logging.warning("skipping a broken checkpoint in %s: %s", self.directory, problem)

    def _write_later(self, saving: _Saving) -> None:
        """Writes this process's entries, in the thread, outside any strategy's scope."""
        with contextlib.suppress(OSError):
            # Priorities are the threads' own. Writing yields to the steps, which replicas wait for.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        following: _Saving | None = saving
        while following:
            self._error = None
            self._write(following)
            with self._handover:
                following, self._next = self._next, None
                self._is_writing = following is not None

    def _write(self, saving: _Saving, is_due: Callable[[], bool] = lambda: True) -> None:
        """Writes this process's entries, once no other thread does, if `is_due` then."""
        if saving.after:
            saving.after.wait()
        # `write_beside` comes from another thread than the run's saves: which is newer is certain once none writes.
        self._writing.acquire()
        try:
            if not is_due():
                return
            self.check()  # it may have waited for others
            os.makedirs(saving.folder, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process's
                files.make_empty(os.path.join(saving.folder, _MARK))
            if self.writer.process:
                # For the first process to seal.
                shares.write_note(saving.folder, self.writer.process, self._write_own(saving))
                self._current_step = saving.step
            else:
                self._write_whole(saving)
            if self._failed_step is not None:
                logging.info("ckpt-%d is written, the first since ckpt-%d could not be", saving.step, self._failed_step)
                self._failed_step = None
        except Exception as error:  # any error has to reach wait()
            self._fail(saving, error)
        finally:
            self._writing.release()
            saving.may_change.set()
            saving.done.set()

    def _fail(self, saving: _Saving, error: Exception) -> None:
        """Frees the space of a save that failed; logs the first failure since a checkpoint was written."""
        why = getattr(error, "strerror", None) or reason(error)  # the message names the directory already
        self._error = SaveError(
            f"ckpt-{saving.step} could not be written to {self.directory}: {why}; free space or repair the directory, "
            "or use another run_dir"
        )
        self._error.__cause__ = error
        if self._failed_step is None:
            self._failed_step = saving.step
            logging.warning("%s. The checkpoint before it stays; a run that continues writes its next one", self._error)
        with contextlib.suppress(OSError):
            if self.writer.process:
                shares.discard(saving.folder, self.writer.process)
                shares.write_failure(saving.folder, self.writer.process, why)
            else:
                manifests.finish_interrupted_writes(self.directory, self._remove)
                _discard(saving.folder)

    def _write_own(self, saving: _Saving) -> list[str]:
        """Writes this process's entries, first those that are read from variables; returns the prefixes to merge."""
        prefix = os.path.join(saving.folder, f"share-{self.writer.process}")
        names = slices.write([entry for entry in saving.entries if entry.is_live], f"{prefix}-live")
        saving.may_change.set()
        return names + slices.write([entry for entry in saving.entries if not entry.is_live], prefix)

    def _write_whole(self, saving: _Saving) -> None:
        """Writes and seals a checkpoint, and removes the oldest beyond `keep`."""
        began = time.monotonic()
        with files.folder_below(*os.path.split(self.directory)):  # refuses a link in its place
            pass
        if self.keep:
            # Before writing, so that a full disk needs no room for one more; never down to one, which might be the
            # broken one.
            self._sweep(max(self.keep - 1, _LEFT_WHILE_WRITING), writing=saving.step)
        self._write_state_file()
        # By its descriptor, since others may write to the run's folder: what was there before is never moved into it.
        whole = files.make_folder(os.path.join(saving.folder, "whole"))
        try:
            manifest = self._move_files(saving, self._write_files(saving, f"/proc/self/fd/{whole}"))
        finally:
            os.close(whole)
        self._write_state_file()
        self._current_step = saving.step
        if self.keep and self._sweep(self.keep):
            self._write_state_file()
        self.written(manifest, time.monotonic() - began)

    def _write_files(self, saving: _Saving, folder: str) -> str:
        """Writes TensorFlow's files, merged with other processes', to a folder; returns their prefix."""
        prefixes = self._write_own(saving)
        prefixes += shares.collect(saving.folder, saving.others, self.writer.timeout_seconds)
        prefix = os.path.join(folder, f"ckpt-{saving.step}")
        with tf.device("CPU:0"):
            # TensorFlow's loaders read one checkpoint, so shares of processes are merged, by renaming their data, not
            # by copying.
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=prefix)
        return prefix

    def _sweep(self, left: int, writing: int | None = None) -> bool:
        """Removes the oldest checkpoints, broken ones first, until `left` remain; returns whether it removed any.

        The checkpoint of the step that is about to be written does not count. The one that this object saved or
        restored last, which is known to be valid, stays.
        """
        listed = [manifest for manifest in self._known() if manifest.step != writing]
        # What this run stands on stays: if all others are broken, it is the only way back.
        swept = [manifest for manifest in listed[: max(0, len(listed) - left)] if manifest.step != self._current_step]
        for manifest in swept:
            for name in manifest.files:
                self._remove(os.path.join(self.directory, name))
            self._remove(manifest.path)
        return bool(swept)

    def _remove(self, path: str) -> bool:
        self._removing(path)
        return manifests.remove(path)

    def _known(self) -> list[Manifest]:
        """Lists the checkpoints on the disk in the order of removal: broken ones, by size, then the oldest."""
        # Sizes tell which are broken: to hash all at each save would read every checkpoint again.
        listed = [manifest for manifest in self._catalogue.read_all()[0] if not manifest.gone()]
        return sorted(listed, key=lambda each: (each.problem(content=False) is None, each.serial))

    def _write_state_file(self) -> None:
        """Writes TensorFlow's `checkpoint` file, for its own tools, from the manifests, the newest last."""
        path = os.path.join(self.directory, manifests.STATE_FILE)
        names = [json.dumps(manifest.name) for manifest in self._known()]
        if not names:
            return
        # tensorflow/core/protobuf's CheckpointState as text; TensorFlow's own writer of it is deprecated.
        lines = [f"model_checkpoint_path: {names[-1]}"]
        lines += [f"all_model_checkpoint_paths: {name}" for name in names]
        lines += [f"all_model_checkpoint_timestamps: {1.0 + i}" for i in range(len(names))]
        files.write_text(path, "\n".join([*lines, "last_preserved_timestamp: 0.0"]) + "\n")

    def _move_files(self, saving: _Saving, prefix: str) -> Manifest:
        """Moves the files that TensorFlow has written to the directory, and removes the save's folder."""
        folder, listed = os.path.dirname(prefix), self._catalogue.read_all()[0]
        manifest = Manifest(
            prefix=os.path.join(self.directory, os.path.basename(prefix)),
            step=saving.step,
            serial=1 + max((manifest.serial for manifest in listed), default=0),
            versions=environment.versions(),
            files=manifests.describe_files(prefix),
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
            **saving.record,
        )
        manifests.publish(manifest, folder, self._remove)
        _discard(saving.folder)
        for name in manifests.listdir(self.directory):
            # Of an earlier save that failed here first: another process began to write its share later.
            if _FOLDER.fullmatch(name) and f"_temp_{self.writer.attempt}_" in name:
                _discard(os.path.join(self.directory, name))
        return manifest


def _discard(folder: str) -> bool:
    """Removes the folder of a save, its mark last; returns whether it was one. An empty one was not marked yet."""
    mark = os.path.join(folder, _MARK)
    if os.path.islink(folder) or not os.path.isfile(mark):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return True
        return False
    for name in manifests.listdir(folder):
        if name != _MARK and not manifests.remove(path := os.path.join(folder, name)):
            shutil.rmtree(path, ignore_errors=True)
    manifests.remove(mark)
    with contextlib.suppress(OSError):  # another process still writes there
        os.rmdir(folder)
    return True
