"""Keeps other hosts from the TCP ports of a cluster that is on this machine alone.

The attack: TensorFlow's servers listen on all interfaces, whatever their address is, and authenticate nobody
(tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc), so that another host can have them run its code. A
firewall that lets no other host reach these ports does the same; this needs no rights and no settings.

Several sockets may listen at one port, and a program in the kernel then picks one for each caller (socket(7),
SO_REUSEPORT): one of ours, which takes nobody, is there first, and gets all callers that do not come over loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SHARED = "TF_GRPC_REUSE_PORT"  # an environment variable: whether TensorFlow's servers set SO_REUSEPORT
_SO_ATTACH_REUSEPORT_CBPF = 51
# Classic BPF (Linux's bpf_common.h, filter.h): (code, jump if true, jump if false, value). Loopback's index is 1 in
# each network. While TensorFlow's socket is not there yet, its callers go to the one that takes nobody.
_BY_INTERFACE = (
    (0x20, 0, 0, 0xFFFFF000 + 8),  # load the index of the interface that the packet came by
    (0x15, 0, 1, 1),  # is it 1?
    (0x06, 0, 0, 1),  # yes: the second socket, TensorFlow's
    (0x06, 0, 0, 0),  # no: the first
)


def _unbound() -> socket.socket:
    """Makes a TCP socket of the family that gRPC listens with: IPv6, for IPv4 as well, where that is in use."""
    with contextlib.suppress(OSError):
        # Only a bind shows it: where IPv6 is switched off, its sockets can still be made.
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return sock
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def listen(port: int, *, only_here: bool, at: str = "") -> socket.socket:
    """Listens at a port that is free, until TensorFlow's server comes. Raises `OSError`.

    Args:
      at: the address of this host at which it listens; empty: all.
      only_here: takes callers from this host alone, where the kernel can do that.
    """
    sock = _unbound() if not at else socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET)
    if only_here:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    return _bound(sock, port, backlog=128, at=at)


def _bound(sock: socket.socket, port: int, backlog: int, at: str = "") -> socket.socket:
    """Binds a socket, which is closed if it can't be; returns it, listening."""
    try:
        # As gRPC does: connections that linger from an earlier process do not matter.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((at, port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def only_this_host(port: int) -> Iterator[None]:
    """Keeps other hosts from the server that TensorFlow starts at a port within, if the kernel can.

    What keeps them out stays for as long as the process, as the server does. Raises `OSError` where the port is in use.
    """
    if not can_refuse_hosts():
        yield
        return
    # The first socket at the port: the program in the kernel tells the two apart by their order.
    # It listens without ever taking a caller: the queue has room for one, and that is this process.
    refusing = _unbound()
    _divide(refusing)
    _bound(refusing, port, backlog=0)
    caller = socket.socket(refusing.family, socket.SOCK_STREAM)
    caller.setblocking(False)  # connected at once, or another has the room
    caller.connect_ex(("::1" if refusing.family == socket.AF_INET6 else "127.0.0.1", port))
    caller.detach()  # both stay open as long as the process
    refusing.detach()
    before = os.environ.get(_SHARED)
    os.environ[_SHARED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHARED]
        else:
            os.environ[_SHARED] = before


def can_refuse_hosts() -> bool:
    """Returns whether the kernel can keep other hosts from a port."""
    with _unbound() as sock:
        return _divide(sock)


def _divide(sock: socket.socket) -> bool:
    """Lets another socket of this user listen at the port, and divides callers between the two; False: it can't."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in _BY_INTERFACE))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        filter = struct.pack("HP", len(_BY_INTERFACE), ctypes.addressof(program))  # struct sock_fprog
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, filter)
    except OSError:
        return False
    return True
