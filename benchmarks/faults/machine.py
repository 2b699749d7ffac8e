"""A machine of one's own for jobs: namespaces in which mounts and the network can fail. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

NEW_NETWORK = 0x40000000  # clone(2), as the next
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_SET_FLAGS, _UP = 0x8914, 1  # netdevice(7)


def run(*command: object) -> str:
    """Runs a command, and returns why it failed; empty if it did not."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


def unshare(spaces: int) -> str:
    """Gives this process, and all that it starts, new namespaces. Returns why it can't; empty if it can."""
    failed = ctypes.CDLL(None, use_errno=True).unshare(spaces)
    return f"no namespaces: {os.strerror(ctypes.get_errno())}" if failed else ""


@functools.cache
def enter() -> str:
    """Gives this process, and all that it starts, mounts and a network of their own, which end with them.

    Call it before there are threads. Returns why it can't; empty if it can.
    """
    user = os.geteuid(), os.getegid()
    if lacks := unshare(_NEW_MOUNTS | NEW_NETWORK | (_NEW_USER if user[0] else 0)):
        return lacks
    if user[0]:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user[0]} 1"), ("gid_map", f"0 {user[1]} 1")):
            Path("/proc/self", name).write_text(text, encoding="utf-8")
    set_up(b"lo")
    return (
        run("mount", "--make-rprivate", "/")
        or run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")  # what jobs leave there is seen
    )


def set_up(interface: bytes) -> None:
    """Has an interface of the network carry packets. Raises OSError."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", interface, _UP))


# Preloaded into a process, it has each write to a file below SLOW take a second more, while SLOW_NOW exists.
_SLOW_WRITES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(int file) {
  char link[32], path[4096];
  const char *below = getenv("SLOW"), *now = getenv("SLOW_NOW");
  if (!below || !now || access(now, F_OK)) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length > 0 && !strncmp(path, below, strlen(below))) sleep(1);
}
#define SLOW(type, name, parameters, arguments, file) \
  type name parameters {                              \
    static type(*next) parameters;                    \
    if (!next) next = dlsym(RTLD_NEXT, #name);        \
    wait_for(file);                                   \
    return next arguments;                            \
  }
SLOW(ssize_t, write, (int file, const void *from, size_t size), (file, from, size), file)
SLOW(size_t, fwrite, (const void *from, size_t size, size_t n, FILE *file), (from, size, n, file), fileno(file))
SLOW(int, fsync, (int file), (file), file)
"""


def lacks_compiler() -> str:
    """Returns why `slow_writes` can't be used; empty if it can."""
    return "" if shutil.which("cc") else "no C compiler"


def slow_writes(folder: Path, below: Path, now: Path) -> dict[str, str]:
    """Returns the environment variables of processes whose writes below a folder take a second more while `now` exists.

    Builds in `folder` what they preload.
    """
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(_SLOW_WRITES, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SLOW": str(below), "SLOW_NOW": str(now)}


class Disk:
    """A small file system that is mounted where a run_dir is, and can fail.

    Args:
      store: the folder of the file system itself.
      path: where it is mounted.
    """

    def __init__(self, store: Path, path: Path):
        self._store, self._path = store, path
        for folder in (store, path):
            folder.mkdir(parents=True)
        run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", store)
        self.mount()

    def mount(self) -> None:
        (self._store / "run").mkdir(exist_ok=True)
        run("mount", "--bind", self._store / "run", self._path)

    def unmount(self) -> None:
        run("umount", "--lazy", self._path)

    def set_writable(self, value: bool) -> None:
        run("mount", "-o", f"remount,{'rw' if value else 'ro'},bind", self._path)

    def fill(self) -> None:
        """Leaves no room in the file system."""
        with (self._store / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def clear(self) -> None:
        (self._store / "filler").unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmounts it, and leaves its files where it was mounted."""
        self.clear()
        self.unmount()
        shutil.copytree(self._store / "run", self._path, dirs_exist_ok=True)
        run("umount", "--lazy", self._store)
