"""The record of a checkpoint's contents, written beside it: files' sizes and SHA-256, variables, the host's state.

Needs no TensorFlow. A manifest is written last, so a checkpoint whose files match its manifest is complete,
whenever the process that wrote it was killed. Before the first file is moved to the directory, the same record is
written under another name, so that each file of a checkpoint is known to be the run's own, or is not touched.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError, UsageError
from ..machine import files

# It grows whenever an earlier version would misread what a later one writes: 3 has Keras's history as text, and the
# values of Keras's metrics.
FORMAT, _READ = 3, (2, 3)
SUFFIX = ".manifest.json"
INCOMPLETE = "incomplete"  # folder of files that were set aside
STATE_FILE = "checkpoint"  # TensorFlow's list of a directory's checkpoints
WRITING = ".writing"  # after SUFFIX: the list of files that are being moved to the directory
_READ_BYTES = 1 << 21
_FILE = re.compile(r"(?P<stem>ckpt-\d+)\.(index|data-\d{5}-of-\d{5})")
_FILE_OF_ANY = re.compile(r"(?P<stem>.+)\.(index|data-\d{5}-of-\d{5})")  # by TensorFlow, of any name
_MANIFEST = re.compile(r"(?P<stem>ckpt-\d+)" + re.escape(SUFFIX))
# Components of a manifest's fields that are objects if present.
_OBJECTS = [("about", part) for part in ("data", "input", "origin", "cpu", "flags", "deciding", "keras", "updated")]
_OBJECTS += [("about", part) for part in ("compile", "final_averages", "optimizers")]
_OBJECTS += [("host_state", "state"), ("host_state", "hooks")]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_EXTRA_BYTES = 1 << 20
Remove = Callable[[str], bool]  # as `remove` does


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One checkpoint's record.

    `prefix` is the path that `tf.train.load_checkpoint` takes. `serial` counts the checkpoints ever written to the
    directory. The newest has the highest serial, which is not the highest step if a run was restored to an earlier
    one. `variables` maps checkpoint keys to [shape, dtype name], `files` names to {"bytes", "sha256"}.
    """

    prefix: str
    step: int
    serial: int
    about: dict
    host_state: dict
    variables: dict
    versions: dict
    files: dict
    time: str  # UTC, ISO 8601

    @property
    def name(self) -> str:
        return os.path.basename(self.prefix)

    @property
    def path(self) -> str:
        """The path of the record itself."""
        return self.prefix + SUFFIX

    @property
    def table_shards(self) -> int:
        """The largest number of shards of its tables with `admit_after`; 0 without any.

        Used as `num_servers`, it restores their number of shards, on which ids' rows depend. Rows of all other tables
        can be read into any number of shards.
        """
        matches = (re.search(r"/admissions/(\d+)/keys/\.ATTRIBUTES/", key) for key in self.variables)
        return max((1 + int(match[1]) for match in matches if match), default=0)

    def other_data(self, about: dict) -> set[str]:
        """Returns which of "train" and "eval" differ, see `other_splits`."""
        return {name.partition("/")[0] for name in self.other_splits(about)}

    def other_splits(self, about: dict) -> set[str]:
        """Returns the splits whose `about["data"]` differs; a split that one side lacks counts as equal.

        If both have evaluation data, a set of one of them alone ("eval", or "eval/NAME" of several) differs.
        The time when files were written (`written`) is ignored, since a copy is the same data, and so is a sample of
        values, which may be rounded otherwise.
        """
        before, now = self.about.get("data", {}), about.get("data", {})
        both = before.keys() & now.keys()
        sets = [{name for name in data if name != "train"} for data in (before, now)]
        alone = sets[0] ^ sets[1] if all(sets) else set()
        return alone | {name for name in both if _contents(before[name]) != _contents(now[name])}

    def is_after(self, other: "Manifest | None") -> bool:
        """Returns whether this checkpoint is newer than one of another directory of the run; None: there is none.

        The step and the times decide: a run may have returned to an earlier step, see `renew`.
        """
        if other is None:
            return True
        is_later = self.step > other.step and self.time > other.time
        return is_later and os.path.getmtime(self.path) > os.path.getmtime(other.path)

    def renew(self) -> None:
        """Notes, by the time of its file, that a run has returned to this checkpoint: none that was there is newer."""
        with contextlib.suppress(OSError):  # a run that only reads may not write
            os.utime(self.path)

    def problem(self, content: bool = True, hashed: Callable[[str], str] | None = None) -> str | None:
        """Returns how the files differ from the manifest; None if they match. Without `content`, compares sizes.

        `hashed` returns a file's hash by its path, e.g. from a cache.
        """
        if self.gone():
            return f"{self.name} was removed"
        problems = (self.file_problem(name, content, hashed) for name in self.files)
        return next(filter(None, problems), None)

    def file_problem(self, name: str, content: bool = True, hashed: Callable[[str], str] | None = None) -> str | None:
        """Returns how one of the files differs, as `problem` does."""
        path, wanted = os.path.join(os.path.dirname(self.prefix), name), self.files[name]
        try:
            size = os.path.getsize(path)
            if size != wanted["bytes"]:
                return f"{name}: expected {wanted['bytes']} bytes, found {size}"
            if content and (digest := (hashed or sha256)(path)) != wanted["sha256"]:
                return f"{name}: expected sha256 {wanted['sha256'][:16]}..., found {digest[:16]}..."
        except FileNotFoundError:
            return f"{name}: expected {wanted['bytes']} bytes, found no file"
        except OSError as error:
            return f"{name}: can't be read: {error.strerror}"
        return None

    def gone(self) -> bool:
        """Returns whether no file is left: then the checkpoint was removed on purpose, not broken."""
        directory = os.path.dirname(self.prefix)
        return not any(os.path.exists(os.path.join(directory, name)) for name in self.files)


def remove(path: str) -> bool:
    """Removes a file or a link, but no folder; returns whether there was one. Raises OSError if its folder is a link.

    Somebody who may write to a run's folder could have put the link to another run's checkpoints there.
    """
    folder, name = os.path.split(path)
    try:
        with files.folder_below(*os.path.split(folder)) as opened:
            os.remove(name, dir_fd=opened)
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def publish(manifest: Manifest, folder: str, remove: Remove = remove) -> None:
    """Moves a checkpoint's files from the folder in which they were written to the directory, its manifest last.

    Raises:
      CheckpointError: a file that no manifest lists has the name of one.
    """
    directory = os.path.dirname(manifest.prefix)
    for name in manifest.files:
        # A rename may reach the disk before the content of what is renamed.
        files.sync(os.path.join(folder, name))
        if os.path.lexists(os.path.join(directory, name)) and not os.path.exists(manifest.path):
            raise CheckpointError(f"{name} exists, and no manifest lists it")
    record = {"format": FORMAT} | dataclasses.asdict(manifest)
    del record["prefix"]  # a directory may be moved
    text = _text(with_digest(record))
    path = os.path.join(folder, manifest.name + SUFFIX)  # if cut short, it is removed with the folder
    files.write_text(path, text)
    # From here on a reader knows which files belong together, though they are moved one by one: a kill in between is
    # finished or undone by the next start.
    os.replace(path, manifest.path + WRITING)
    files.sync(directory)
    for name in manifest.files:
        os.replace(os.path.join(folder, name), os.path.join(directory, name))
    _rename_to_manifest(manifest, remove)


def _rename_to_manifest(manifest: Manifest, remove: Remove) -> None:
    """Renames the list of a checkpoint whose files are in the directory to its manifest."""
    directory, path = os.path.dirname(manifest.prefix), manifest.path
    if os.path.exists(path):  # of the same step, written earlier, perhaps in more files
        with contextlib.suppress(CheckpointError):
            # They are listed in no manifest once this one is replaced, so nobody would ever remove them.
            for name in read(path).files.keys() - manifest.files.keys():
                remove(os.path.join(directory, name))
    files.sync(directory)
    # The one moment at which the checkpoint becomes valid.
    os.replace(path + WRITING, path)
    files.sync(directory)


def finish_interrupted_writes(directory: str, remove: Remove = remove) -> list[str]:
    """Publishes checkpoints whose files were all moved; removes the other interrupted ones, and returns their files."""
    removed = []
    for name in listdir(directory):
        if not name.endswith(WRITING) or not _MANIFEST.fullmatch(name.removesuffix(WRITING)):
            continue
        try:
            manifest = read(os.path.join(directory, name))
        except CheckpointError:
            continue  # it lists no file
        if manifest.problem() is None:
            _rename_to_manifest(manifest, remove)
            continue
        # A file that differs from the list is not this write's: an earlier checkpoint of the step may have that name.
        for file in manifest.files:
            if manifest.file_problem(file) is None:
                removed.append(file)
            removed.append(f"{file}.tmp")  # an incomplete copy to another file system
        removed.append(name)
    return [name for name in removed if remove(os.path.join(directory, name))]


def unlisted_files(directory: str) -> list[str]:
    """Lists the checkpoint files that no manifest lists: another program's, or a run's whose manifests are lost."""
    names = sorted(listdir(directory))
    matches = [match for match in map(_FILE_OF_ANY.fullmatch, names) if match]
    left = [match[0] for match in matches if match["stem"] + SUFFIX not in names]
    return left + [name for name in names if name == STATE_FILE and not any(map(_MANIFEST.fullmatch, names))]


def is_file_after(name: str, step: int) -> bool:
    """Returns whether a name is that of a run's checkpoint file of a later step."""
    return bool(_FILE.fullmatch(name)) and step_from_name(name) > step


def read(path: str) -> Manifest:
    """Reads a manifest.

    Raises:
      CheckpointError: the file is not a complete manifest of a known format, whose files are all of its own step.
    """
    name = os.path.basename(path)
    try:
        record = files.read_json(path)
        if not isinstance(record, dict):
            raise CheckpointError(f"{name}: expected a manifest, found {_shown(record)}")
        if (found := record.get("format")) not in _READ:
            versions = record.get("versions")
            writer = versions.get("crankshaft") if isinstance(versions, dict) else None
            by = f", by crankshaft {_shown(writer)}; install it" if writer else ""
            raise CheckpointError(f"{name}: expected format {' or '.join(map(str, _READ))}, found {_shown(found)}{by}")
        # Content that was changed or damaged is often valid JSON still; the digest shows it.
        recorded = record.pop("sha256", None)
        if recorded != (digest := _digest(record)):
            raise CheckpointError(f"{name}: expected content of sha256 {_shown(recorded)}, found {digest[:16]}...")
        del record["format"]
        _check_fields(name, record)
        manifest = Manifest(prefix=path.removesuffix(WRITING).removesuffix(SUFFIX), **record)
        _check_files(name, manifest)
        return manifest
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{name}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{name}: expected a manifest, found {type(error).__name__}: {error}") from error


def manifest_at(prefix: str) -> Manifest | None:
    """Reads the manifest of the checkpoint at a path; None if TensorFlow alone wrote it. Raises `CheckpointError`."""
    path = os.path.abspath(prefix) + SUFFIX
    return read(path) if os.path.exists(path) else None


def _check_fields(name: str, record: dict) -> None:
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Manifest) if field.name != "prefix"}
    for field in sorted(kinds.keys() | record.keys()):
        if field not in kinds:
            raise CheckpointError(f"{name}: expected a manifest, found {field} in it")
        if type(record.get(field)) is not kinds[field]:
            actual = _shown(record[field]) if field in record else "none"
            raise CheckpointError(f"{name}: expected {field} to be of type {kinds[field].__name__}, found {actual}")
    _check_objects(name, record)
    for key, described in record["variables"].items():
        if not isinstance(described, list) or [type(part) for part in described] != [list, str]:
            raise CheckpointError(f"{name}: expected shape and dtype of {key}, found {_shown(described)}")


def _check_objects(name: str, record: dict) -> None:
    objects = {f"{field}.{part}": record[field].get(part, {}) for field, part in _OBJECTS}
    hooks = objects["host_state.hooks"]
    objects |= {f"host_state.hooks.{name}": hooks[name] for name in (hooks if isinstance(hooks, dict) else ())}
    for part, value in objects.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{name}: expected {_shown(part)} to be an object, found {_shown(value)}")


def _check_files(name: str, manifest: Manifest) -> None:
    """Checks that only this checkpoint's files are listed, since listed files are read and removed."""
    if manifest.name != f"ckpt-{manifest.step}":
        raise CheckpointError(f"{name}: expected step {step_from_name(name)}, found {_shown(manifest.step)}")
    for file, recorded in manifest.files.items():
        match = _FILE.fullmatch(file)
        if not match or match["stem"] != manifest.name:
            raise CheckpointError(f"{name}: expected files of {manifest.name}, found {_shown(file)}")
        size, digest = (recorded.get(key) if isinstance(recorded, dict) else None for key in ("bytes", "sha256"))
        if type(size) is not int or not 0 <= size < 1 << 63 or not _SHA256.fullmatch(str(digest)):
            raise CheckpointError(f"{name}: expected bytes and sha256 of {file}, found {_shown(recorded)}")


def _shown(value) -> str:
    """Formats a value that was read from a file, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_read(about: dict, host_state: dict) -> dict[str, dict]:
    """Returns `about` and `host_state`, plain JSON and NumPy scalars, as they will be read back from a manifest.

    Raises:
      CheckpointError: a manifest with them could not be written or read.
    """
    name, record = "a checkpoint", {"about": about, "host_state": host_state}
    try:
        record = json.loads(json.dumps(record, default=_scalar))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} can't keep {reprlib.repr(host_state)}: {error}") from error
    _check_objects(name, record)
    return record


def check_extra(values: dict[str, Any]) -> None:
    """Checks the values that a program saves in a checkpoint.

    Raises:
      UsageError: a resumed run would not read the same values, or they are too many.
    """
    try:
        text = json.dumps(values, allow_nan=False)
        if not isinstance(values, dict):
            raise TypeError(f"it is of type {type(values).__name__}, not a dictionary")
        if as_read({}, {"extra": values})["host_state"]["extra"] != _with_lists(values):
            raise ValueError("its keys are not all strings")
    except (CheckpointError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"extra={reprlib.repr(values)} can't be saved in a checkpoint ({error}); use a dictionary with string "
            "keys, of numbers, strings, and lists and dictionaries of them"
        ) from None
    if len(text) > _MOST_EXTRA_BYTES:
        raise UsageError(
            f"extra takes {len(text):,} bytes, and a checkpoint keeps {_MOST_EXTRA_BYTES:,} at most; write a file "
            "beside the run, and keep its name"
        )


def _with_lists(value: Any) -> Any:
    """Plain JSON as it is read back, which has no tuples."""
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, (list, tuple)) else value


def _scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _text(record: dict) -> str:
    return json.dumps(record, indent=1, sort_keys=True)


def with_digest(record: dict) -> dict:
    """Returns a manifest's record with the digest of all else in it."""
    # A record that was read and changed still has the digest of what it was.
    content = {key: value for key, value in record.items() if key != "sha256"}
    return content | {"sha256": _digest(content)}


def _digest(record: dict) -> str:
    # By sorted keys: those of a record that was read back come in the file's order.
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_all(directory: str, read: Callable[[str], Manifest] = read) -> tuple[list[Manifest], dict[int, str]]:
    """Returns all manifests, newest first, and {step: problem} for the checkpoints without a readable one."""
    manifests, problems, removed = [], {}, []
    names = listdir(directory)
    for name in names:
        if _MANIFEST.fullmatch(name):
            try:
                manifests.append(read(os.path.join(directory, name)))
            except CheckpointError as error:
                if os.path.lexists(os.path.join(directory, name)):
                    problems[step_from_name(name)] = error.message
                else:  # the run, which writes the next one first, has removed it meanwhile
                    removed.append(name)
    # All were removed while they were read, so newer ones are there now.
    if removed and not manifests:
        return read_all(directory, read)
    lists = {name.removesuffix(WRITING) for name in names}  # what is being moved is not broken
    for name in names:
        match = _FILE.fullmatch(name)
        if match and match["stem"] + SUFFIX not in lists and os.path.lexists(os.path.join(directory, name)):
            problems[step_from_name(name)] = f"{match['stem']}: expected {match['stem'] + SUFFIX}, found none"
    return sorted(manifests, key=lambda manifest: -manifest.serial), problems


def describe_files(prefix: str) -> dict:
    """Returns {name: {"bytes", "sha256"}} of the files that TensorFlow wrote of a checkpoint."""
    folder, stem = os.path.split(prefix)
    matches = filter(None, map(_FILE.fullmatch, sorted(listdir(folder))))
    paths = {match[0]: os.path.join(folder, match[0]) for match in matches if match["stem"] == stem}
    return {name: {"bytes": os.path.getsize(path), "sha256": sha256(path)} for name, path in paths.items()}


def is_being_written(directory: str) -> bool:
    """Returns whether a checkpoint's files are being moved to the directory, or were when its process was killed."""
    return any(name.endswith(SUFFIX + WRITING) for name in listdir(directory))


def steps(directory: str) -> set[int]:
    """Returns the steps of all manifests, unreadable ones included."""
    return {step_from_name(name) for name in listdir(directory) if _MANIFEST.fullmatch(name)}


def newest_step(directory: str) -> int:
    """Returns the step of the checkpoint that was written last; -1 without one."""
    return next((manifest.step for manifest in read_all(directory)[0]), -1)


def step_from_name(name: str) -> int:
    """Returns the step in the name of one of a checkpoint's files."""
    return int(re.findall(r"\d+", name)[0])


def listdir(directory: str) -> list[str]:
    """Lists the names in a directory; none if there is no such directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sha256(path: str) -> str:
    """Returns a file's hash in hexadecimal, reading it in pieces."""
    digest = hashlib.sha256()
    with open(files.open_regular(path), "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _contents(data: Any) -> Any:
    ignored = ("written", "sample")
    return {name: value for name, value in data.items() if name not in ignored} if isinstance(data, dict) else data
