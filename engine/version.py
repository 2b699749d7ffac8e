"""The version of this package, as setup.cfg has it, and which code it is. Runs on the host; needs no TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path

from .own_code import FILES_LIKE_USERS, OWN_FILES, ROOT

__version__ = "1.0.0"
_ROOT = Path(__file__).parent.parent


@functools.cache
def build() -> str | None:
    """Returns a digest of the package's own Python files, 12 hexadecimal digits: alike for a wheel and a checkout.

    None where they are in an archive, or only compiled.
    """
    digest = hashlib.sha256()
    ours = [_ROOT / path.removeprefix(ROOT) for path in (*OWN_FILES, *FILES_LIKE_USERS)]
    files = {file for path in ours for file in ([path] if path.suffix else path.rglob("*.py"))}
    with contextlib.suppress(OSError):
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:12]
    return None


@functools.cache
def commit() -> str | None:
    """Returns git's commit of a checkout of this package; None elsewhere. An edited file has another `build` alone."""
    git = _ROOT / ".git"
    with contextlib.suppress(OSError):
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not (name := head.removeprefix("ref: ")) or name == head:
            return head or None
        with contextlib.suppress(FileNotFoundError):
            return (git / name).read_text(encoding="utf-8").strip()
        for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line.partition(" ")[0]
    return None


def replaced() -> str:
    """Describes the build that has replaced the files of this process since it began; "" if none has."""
    if (found := build.__wrapped__()) == build():
        return ""
    return f"the code is build {found or 'unknown'} by now: what runs goes on with build {build()}, with which it began"


def described() -> str:
    """Returns "1.0.0 (build 0123456789ab, commit 0123abcd)", as people are shown it."""
    at = f", commit {sha[:8]}" if (sha := commit()) else ""
    return f"{__version__} (build {build() or 'unknown'}{at})"


described()  # reads both now, as the files may be replaced while this process runs
