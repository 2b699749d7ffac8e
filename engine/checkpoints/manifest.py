"""What a checkpoint is meant to hold, written beside it: its files' sizes and SHA-256, variables, the host's state.

Host code, no TensorFlow: a manifest is the last thing written of a checkpoint, so that a checkpoint with a manifest
whose files match is whole, whenever the process that wrote it was killed.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable

FORMAT = 1
SUFFIX = ".manifest.json"
_READ_BYTES = 1 << 21
_FILE = re.compile(r"(?P<stem>ckpt-\d+)\.(index|data-\d{5}-of-\d{5})")
_MANIFEST = re.compile(r"(?P<stem>ckpt-\d+)" + re.escape(SUFFIX))
# What a killed writer leaves: TensorFlow's shards before they are merged, this file's and TensorFlow's temporary names.
_LEFTOVER = re.compile(r"ckpt-\d+_temp.*|.*\.tmp\w*")


class CheckpointError(Exception):
    """A checkpoint that can't be written, read or fitted to the state; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One checkpoint's record.

    `prefix` is the path that `tf.train.load_checkpoint` takes. `serial` counts the checkpoints ever written to the
    directory: the newest is the one with the highest, which is not the highest step once a run was taken back to an
    earlier one. `variables` maps checkpoint keys to [shape, dtype name], `files` names to {"bytes", "sha256"}.
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

    def other_data(self, about: dict) -> set[str]:
        """The splits that are other data now, by what `about` says of each under "data"; of both, or it is taken as the
        same."""
        before, now = self.about.get("data", {}), about.get("data", {})
        return {split for split in before.keys() & now.keys() if before[split] != now[split]}

    def problem(self, content: bool = True, hashed: Callable[[str], str] | None = None) -> str | None:
        """How the files differ from the manifest, or None when they match. Without `content`, sizes only.

        `hashed` gives a file's hash by its path, where some are known already.
        """
        if self.gone():
            return f"{self.name} was removed"
        for name, wanted in self.files.items():
            path = os.path.join(os.path.dirname(self.prefix), name)
            try:
                size = os.path.getsize(path)
                if size != wanted["bytes"]:
                    return f"{name}: expected {wanted['bytes']} bytes, found {size}"
                if content and (found := (hashed or sha256)(path)) != wanted["sha256"]:
                    return f"{name}: expected sha256 {wanted['sha256'][:16]}..., found {found[:16]}..."
            except FileNotFoundError:
                return f"{name}: expected {wanted['bytes']} bytes, found no file"
            except OSError as error:
                return f"{name}: can't be read: {error.strerror}"
        return None

    def gone(self) -> bool:
        """Whether no file is left at all: a checkpoint that was swept, not one that broke."""
        directory = os.path.dirname(self.prefix)
        return not any(os.path.exists(os.path.join(directory, name)) for name in self.files)


def write(manifest: Manifest) -> None:
    """Puts the manifest beside its files, all or nothing; the files themselves are on the disk before it is."""
    directory = os.path.dirname(manifest.prefix)
    for name in manifest.files:
        _fsync(os.path.join(directory, name))
    record = {"format": FORMAT} | dataclasses.asdict(manifest)
    del record["prefix"]  # a directory may be moved
    path = manifest.prefix + SUFFIX
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync(directory)


def read(path: str) -> Manifest:
    """Raises CheckpointError when the file is not a whole manifest of a known format."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        if (version := record.pop("format")) != FORMAT:
            raise CheckpointError(f"{name}: expected format {FORMAT}, found {version}")
        manifest = Manifest(prefix=path.removesuffix(SUFFIX), **record)
        if manifest.name != f"ckpt-{manifest.step}":
            raise CheckpointError(f"{name}: expected step {step_of(name)}, found {manifest.step}")
        for recorded in manifest.files.values():
            recorded["bytes"], recorded["sha256"]
        return manifest
    except OSError as error:
        raise CheckpointError(f"{name}: can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: expected a manifest, found {error!r}") from error


def read_all(directory: str, read: Callable[[str], Manifest] = read) -> tuple[list[Manifest], dict[int, str]]:
    """Every manifest, newest first, and {step: what is wrong} of the checkpoints that have none that can be read.

    `read` gives a manifest by its path, where some are known already.
    """
    manifests, problems = [], {}
    names = listdir(directory)
    for name in names:
        if _MANIFEST.fullmatch(name):
            try:
                manifests.append(read(os.path.join(directory, name)))
            except CheckpointError as error:
                problems[step_of(name)] = str(error)
    for name in names:
        match = _FILE.fullmatch(name)
        if match and match["stem"] + SUFFIX not in names:
            unfinished = f"{match['stem']}: expected {match['stem'] + SUFFIX}, found none: unfinished"
            problems[step_of(name)] = unfinished
    return sorted(manifests, key=lambda manifest: -manifest.serial), problems


def describe_files(prefix: str) -> dict:
    """{name: {"bytes", "sha256"}} of the files that TensorFlow wrote for `prefix`."""
    directory, stem = os.path.split(prefix)
    files = {}
    for name in sorted(listdir(directory)):
        match = _FILE.fullmatch(name)
        if match and match["stem"] == stem:
            path = os.path.join(directory, name)
            files[name] = {"bytes": os.path.getsize(path), "sha256": sha256(path)}
    return files


def leftovers(directory: str, read: Callable[[str], Manifest] = read) -> list[str]:
    """Names of what no manifest owns: temporary files and folders, files of unfinished and of swept checkpoints."""
    names = listdir(directory)
    found = []
    for name in names:
        match = _FILE.fullmatch(name)
        if _LEFTOVER.fullmatch(name) or (match and match["stem"] + SUFFIX not in names):
            found.append(name)
    return found + [manifest.name + SUFFIX for manifest in read_all(directory, read)[0] if manifest.gone()]


def steps(directory: str) -> set[int]:
    """The steps of all manifests, those too that can't be read."""
    return {step_of(name) for name in listdir(directory) if _MANIFEST.fullmatch(name)}


def step_of(name: str) -> int:
    """The step in the name of one of a checkpoint's files."""
    return int(re.match(r"ckpt-(\d+)", name)[1])


def listdir(directory: str) -> list[str]:
    """Names in the directory; none when there is no such directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sha256(path: str) -> str:
    """A file's hash in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
