"""The version of this package, as setup.cfg has it, and which code it is. Runs on the host; needs no TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path

from .own_code import FILES_LIKE_USERS, OWN_FILES, ROOT

__version__ = "1.0.0"
_ROOT = Path(ROOT)


@functools.cache
def build() -> str:
    """Returns a digest of the package's own Python files, 12 hexadecimal digits: alike for a wheel and a checkout."""
    digest = hashlib.sha256()
    ours = [Path(path) for path in (*OWN_FILES, *FILES_LIKE_USERS)]
    files = {file for path in ours for file in ([path] if path.suffix else path.rglob("*.py"))}
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


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


def described() -> str:
    """Returns "1.0.0 (build 0123456789ab, commit 0123abcd)", as people are shown it."""
    at = f", commit {sha[:8]}" if (sha := commit()) else ""
    return f"{__version__} (build {build()}{at})"
