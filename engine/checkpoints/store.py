"""Checkpoints of everything a run needs to go on: written beside training, verified, kept, restored. Host code.

The order of writing makes a kill at any moment harmless: TensorFlow's files, on the disk; then the manifest, renamed
into place. The oldest are removed before that as far as two others stay, so that from `keep=3` on the disk holds no
more than `keep`, and the system writes into the memory of the files just removed; the rest are removed after it. The
manifests alone decide what exists: TensorFlow's `checkpoint` file, which a killed process leaves stale, is written anew
from them at each save and not read here.

Saving is asynchronous, by a snapshot and a thread. TensorFlow's way,
`CheckpointOptions(experimental_enable_async_checkpoint=True)`, does not work with Keras 3 variables: its second save
fails (`Variable._copy_trackable_to_cpu` makes variables inside a `tf.function`); it also keeps a second copy of the
state for good, does not see variables made after the first save, and reports a failed write only at the next save.
"""

import contextlib
import datetime
import json
import os
import shutil
import threading
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.checkpoints import snapshot
from crankshaft.engine.checkpoints.catalogue import Catalogue
from crankshaft.engine.checkpoints.manifest import CheckpointError, Manifest
from crankshaft.engine.internals.errors import reason
from crankshaft.engine.internals.tensorflow import TrackableNode
from crankshaft.engine.machine import environment, files

# Writing and hashing keep a core busy; a training step that shares its core waits for its slower half.
_NICENESS = 15
# Kept besides the one being written: were the newest found to be broken, there is one more.
_LEFT_WHILE_WRITING = 2


class Checkpoints:
    """The checkpoints of one state in one directory on a file system that renames atomically.

    One object writes at a time; any number, in any process, may read. Reading changes nothing on the disk. `keep` is
    how many of the newest stay, None or 0 being all. `about` goes into every manifest: model, input, configuration,
    anything that `json` takes. Where several processes train one state, one has `writes`: the others call the same
    methods, and change nothing on the disk.
    """

    def __init__(self, directory, state: tf.train.Checkpoint, *, keep: int | None, about: dict, writes: bool = True):
        self.directory = os.path.abspath(directory)
        self.writes = writes
        self.state = state
        self.keep = keep or None
        self.about = about
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._current_step: int | None = None  # what this object saved or restored last
        self._warned: set[str] = set()
        self._catalogue = Catalogue(self.directory)

    def clean(self) -> list[str]:
        """Removes what killed writers left, and returns the names. Only for the process that writes, before it does.

        That is: temporary files, and files of checkpoints without a manifest. A checkpoint with a manifest stays,
        broken or not, until it is written again or removed by `keep`.
        """
        self.wait()
        names = self._catalogue.leftovers() if self.writes else []
        for name in names:
            logging.info("removing %s, left by a process that was ended", name)
            _remove(os.path.join(self.directory, name))
        return names

    def save(self, step: int, host_state: dict, *, wait: bool = False, force: bool = False) -> None:
        """Writes the state as it is now; returns when the variables may change again.

        Does nothing when this object's last save or restore was of the same step, unless `force`. Waits for the save
        before this one, and raises its CheckpointError. `host_state`, what `json` takes and NumPy scalars, is kept in
        the manifest and is also read at once.
        """
        self.wait()
        if step == self._current_step and not force:
            return
        if not self.writes:
            snapshot.take(self.state)  # takes part in gathering what differs by replica
            self._current_step = step
            return
        about, host_state = _jsonable("about", self.about), _jsonable("host_state", host_state)
        tree, variables = snapshot.take(self.state)
        record = {"about": about, "host_state": host_state, "variables": variables}
        # Not a daemon: a process that ends, by an exception too, first finishes what it is writing.
        may_change = threading.Event()
        arguments = (int(step), tree, record, may_change)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint-{step}")
        self._thread.start()
        may_change.wait()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written. Raises the write's CheckpointError, once, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def latest(self) -> Manifest | None:
        """Returns the newest checkpoint whose files match its manifest, or None.

        Warns of each newer one that is skipped, with the file, what was expected and what was found; of each once.
        """
        return next(self._valid(), None)

    def all(self, where: Callable[[Manifest], bool] = lambda manifest: True) -> list[Manifest]:
        """Returns all checkpoints for which `where` holds and whose files match their manifests, the oldest first."""
        return list(self._valid(where))[::-1]

    def problem(self) -> str | None:
        """Returns what is wrong with the newest checkpoint if manifests exist, none of a whole one; else None."""
        found, unreadable = self._catalogue.read_all()
        sealed = manifests.steps(self.directory)
        problems = [unreadable[step] for step in sorted(unreadable) if step in sealed]
        problems += [self._catalogue.problem(each) for each in found[::-1]]
        return problems[-1] if problems and all(problems) else None

    def restore(self, manifest: Manifest | None = None) -> Manifest | None:
        """Restores the state's variables from a checkpoint, the latest one if None, and returns its manifest.

        Returns None when there is no valid checkpoint.

        Raises:
          CheckpointError: before any variable is changed, when the checkpoint is broken or is not one of this state:
            variables missing, extra or of another shape or type.
        """
        self.wait()
        if manifest is not None:
            if problem := self._catalogue.problem(manifest):
                raise CheckpointError(f"{problem}, in {self.directory}; restore another checkpoint")
            self._restore_verified(manifest)
            return manifest
        while (manifest := self.latest()) is not None:
            try:
                self._restore_verified(manifest)
                return manifest
            except (tf.errors.OpError, CheckpointError):
                # A writer elsewhere may have removed it since; then there is a newer one.
                if manifest.problem(content=False) is None:
                    raise
        return None

    def _restore_verified(self, manifest: Manifest) -> None:
        try:
            comparison = snapshot.compare(manifest.prefix, self.state)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{manifest.prefix} can't be read: {reason(error)}") from error
        if comparison.missing or comparison.extra or comparison.reshaped:
            raise CheckpointError(
                f"{manifest.name} in {self.directory} is of another model or optimizer; "
                "use another `run_dir`, or take its weights only with `init_from`\n" + comparison.message()
            )
        snapshot.to_restore(self.state).read(manifest.prefix).expect_partial()
        self._current_step = manifest.step

    def _valid(self, where: Callable[[Manifest], bool] = lambda manifest: True):
        """Yields valid checkpoints, newest first, with a warning for each that is skipped on the way."""
        found, unreadable = self._catalogue.read_all()
        for manifest in found:
            if not where(manifest) or manifest.gone():
                continue  # removed, by this process or another
            problem = self._catalogue.problem(manifest)
            if problem is None:
                self._warn_newer(unreadable, manifest.step)
                yield manifest
            elif not manifest.gone():
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

    def _write(self, step: int, tree: dict, record: dict, may_change: threading.Event) -> None:
        """Writes a checkpoint, in the thread, outside any strategy's scope. Sets `may_change` after its last read."""
        if not snapshot.rows_in(tree):
            may_change.set()
        with contextlib.suppress(OSError, AttributeError):  # Linux has a priority for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            os.makedirs(self.directory, exist_ok=True)
            if self.keep:
                self._sweep(max(self.keep - 1, _LEFT_WHILE_WRITING), writing=step)
            self._write_state_file()
            self._write_files(step, tree, may_change)
            self._seal(os.path.join(self.directory, f"ckpt-{step}"), step, record)
            self._write_state_file()
            self._current_step = step
            if self.keep and self._sweep(self.keep):
                self._write_state_file()
        except Exception as error:  # whatever it is, it has to reach wait()
            why = getattr(error, "strerror", None) or reason(error)  # the message names the directory already
            self._error = CheckpointError(
                f"ckpt-{step} could not be written to {self.directory}: {why}; "
                "make room or mend the directory, or use another `run_dir`"
            )
            self._error.__cause__ = error
            with contextlib.suppress(OSError):
                for name in self._catalogue.leftovers():
                    _remove(os.path.join(self.directory, name))  # gives back the room that it took
        finally:
            may_change.set()

    def _write_files(self, step: int, tree: dict, may_change: threading.Event) -> None:
        """Writes TensorFlow's files: the large tables' slices, then the rest, merged into one checkpoint."""
        folder = os.path.join(self.directory, f"ckpt-{step}_temp_parts")  # as `manifest.leftovers` knows it
        _remove(folder)
        os.makedirs(folder)
        parts: list[str] = []
        for number, rows in enumerate(snapshot.rows_in(tree)):
            parts += rows.write(os.path.join(folder, f"rows-{number}"))
        checkpoint = snapshot.to_checkpoint(tree)
        may_change.set()
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=None)
        parts.append(manager.save(checkpoint_number=step))
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=parts, destination_prefix=os.path.join(self.directory, f"ckpt-{step}")
            )
        _remove(folder)

    def _sweep(self, left: int, writing: int | None = None) -> bool:
        """Removes the oldest checkpoints, broken ones first, until `left` remain; returns whether it removed any.

        The checkpoint of the step that is about to be written, maybe again, does not count; the one that this object
        saved or restored last, and so knows to be whole, stays.
        """
        known = [each for each in self._known() if each.step != writing]
        swept = [each for each in known[: max(0, len(known) - left)] if each.step != self._current_step]
        for manifest in swept:
            for name in manifest.files:
                _remove(os.path.join(self.directory, name))
            _remove(manifest.prefix + manifests.SUFFIX)
        return bool(swept)

    def _known(self) -> list[Manifest]:
        """Lists the checkpoints on the disk in the order of removal: broken ones, by size, then the oldest."""
        known = [each for each in self._catalogue.read_all()[0] if not each.gone()]
        return sorted(known, key=lambda each: (each.problem(content=False) is None, each.serial))

    def _write_state_file(self) -> None:
        """Writes TensorFlow's `checkpoint` file, for its own tools, from the manifests, the newest last."""
        path = os.path.join(self.directory, "checkpoint")
        names = [json.dumps(each.name) for each in self._known()]
        if not names:
            _remove(path)
            return
        # tensorflow/core/protobuf's CheckpointState as text; TensorFlow's own writer of it is deprecated.
        lines = [f"model_checkpoint_path: {names[-1]}"]
        lines += [f"all_model_checkpoint_paths: {name}" for name in names]
        lines += [f"all_model_checkpoint_timestamps: {1.0 + i}" for i in range(len(names))]
        files.write_text(path, "\n".join([*lines, "last_preserved_timestamp: 0.0"]) + "\n")

    def _seal(self, prefix: str, step: int, record: dict) -> None:
        """Writes the manifest of the files that TensorFlow has just finished."""
        known = self._catalogue.read_all()[0]
        manifests.write(
            Manifest(
                prefix=prefix,
                step=step,
                serial=1 + max((each.serial for each in known), default=0),
                versions=environment.versions(),
                files=manifests.describe_files(prefix),
                time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                **record,
            )
        )


def load_weights(path, target, name: str = "trainer.model") -> list[str]:
    """Loads `target`'s variables from `name` in another run's checkpoint, and nothing else.

    Args:
      path: a run's directory, a directory of checkpoints (of either, the newest valid one is taken), or one
        checkpoint's prefix, such as `.../ckpt-1000`. Checkpoints by plain `tf.train.Checkpoint` are taken too.
      target: what is tracked under `name` here: a Keras model, a tf.Module, a tf.train.Checkpoint.
      name: the attributes from the checkpoint's root to it, with dots; "" is the root.

    Returns:
      The names of the variables that were loaded.

    Raises:
      CheckpointError: before any variable is changed, for a path without a valid checkpoint, for variables that are
        missing, extra or of another shape or type, and when nothing matches.
    """
    prefix = _find_prefix(os.path.abspath(path))
    at = tuple(part for part in name.split(".") if part)
    try:
        comparison = snapshot.compare(prefix, target, at)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{prefix} can't be read as a checkpoint: {reason(error)}") from error
    if comparison.missing or comparison.extra or comparison.reshaped or not comparison.matched:
        raise CheckpointError(
            f"the weights in {prefix} do not fit this model; use the same `model` and `model_arg` as that run\n"
            + comparison.message()
        )
    holder = target
    for part in reversed(at):
        inner, holder = holder, TrackableNode()
        setattr(holder, part, inner)
    snapshot.to_restore(holder).read(prefix).expect_partial()
    return comparison.matched


def _find_prefix(path: str) -> str:
    if any(os.path.isfile(path + ending) for ending in (".index", manifests.SUFFIX)):
        if problem := _sealed_problem(path):
            raise CheckpointError(f"{problem}, in {os.path.dirname(path)}; use another checkpoint")
        return path
    problems = []
    for directory in (os.path.join(path, "checkpoints"), path):
        reader = Checkpoints(directory, tf.train.Checkpoint(), keep=None, about={})
        if (manifest := reader.latest()) is not None:
            return manifest.prefix
        if problem := reader.problem():
            problems.append(f"no checkpoint in {directory} can be read ({problem}); mend it, or use another checkpoint")
    plain = tf.train.latest_checkpoint(path) if os.path.isfile(os.path.join(path, "checkpoint")) else None
    if plain is not None and _sealed_problem(plain) is None:
        return plain
    if problems:
        raise CheckpointError(problems[0])
    raise CheckpointError(
        f"no valid checkpoint at {path}; expected a run's directory, its checkpoints/, or a path such as .../ckpt-1000"
    )


def _sealed_problem(prefix: str) -> str | None:
    """Returns what is wrong with a checkpoint by its manifest; None if nothing is, or if TensorFlow alone wrote it."""
    if not os.path.exists(prefix + manifests.SUFFIX):
        return None
    try:
        return manifests.read(prefix + manifests.SUFFIX).problem()
    except CheckpointError as error:
        return str(error)


def _jsonable(name: str, value: dict) -> dict:
    """Returns a copy of `value` as it will be read back from JSON."""

    def scalar(item):
        if hasattr(item, "item"):
            return item.item()
        raise TypeError(f"{type(item).__name__} is not JSON")

    try:
        return json.loads(json.dumps(value, default=scalar))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}={value!r} can't be kept in a manifest: {error}") from error


def _remove(path: str) -> None:
    """Removes a file, or a folder that TensorFlow made while it wrote; no other folder, whatever names it."""
    if manifests.is_temporary_folder(os.path.basename(path)) and not os.path.islink(path) and os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.remove(path)
