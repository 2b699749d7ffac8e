"""Gives a process its own network, loopback alone, so that only its descendants reach each other's ports. Linux.

TensorFlow's servers listen on all interfaces, whatever address they are given, and authenticate nobody
(tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc; SECURITY.md).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from ..errors import UsageError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # netdevice(7): SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


def enter() -> None:
    """Moves this process, which may have one thread only, and its future children to a new network.

    Root needs no more than that; other users may do it within a user namespace (user_namespaces(7)), where they keep
    their user and group.

    Raises:
      UsageError: the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        if user != 0 or not _unshare(_CLONE_NEWNET):
            if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _raise_loopback()
    except OSError as error:
        raise UsageError(
            f"--own_network can't be had ({error.strerror}, says the kernel or the container); leave it out, and let a "
            "firewall keep others from the tasks' ports"
        ) from None


def _unshare(what: int) -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(what) == 0


def _raise_loopback() -> None:
    """Brings a new network's loopback up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, request)
        (flags,) = struct.unpack_from("h", answer, 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
