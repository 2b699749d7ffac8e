"""Keeps other hosts from the listening sockets of this process. Host code, Linux.

TensorFlow's servers listen on all interfaces, whatever address they are given, and authenticate nobody
(tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc). Where a cluster is on one machine, its sockets can still
be bound to the loopback interface afterwards, by SO_BINDTODEVICE (socket(7)), which any user may do to their own socket
since Linux 5.7.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator

from .tf_config import Cluster, split

_LOOPBACK = b"lo\0"


def close_to_other_hosts(cluster: Cluster) -> None:
    """Binds all listeners at this task's port to loopback, if the whole cluster is there and the kernel allows it.

    To be called as soon as TensorFlow's server runs. Existing connections stay.
    """
    if sys.platform == "linux" and all(_is_loopback(split(address)[0]) for _, address in cluster.addresses):
        for listener in _listeners(split(cluster.address)[1]):
            _bind(listener)


def can_be_closed() -> bool:
    """Returns whether the kernel allows binding to loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return _bind(sock)


def _bind(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
    except OSError:
        return False
    return True


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yields this process's TCP sockets that listen at a port, on any interface."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if _listens_at(port, sock):
                        yield sock


def _listens_at(port: int, sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return sock.getsockname()[1] == port and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
