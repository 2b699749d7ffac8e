"""The rendezvous of a run's tasks: waits for the peers before TensorFlow starts, and answers them.

TensorFlow's constructor of a multi-worker strategy waits for all tasks without end, and holds Python's lock meanwhile:
no thread and no signal handler runs. So the peers are awaited here, before it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ...engine import logging
from ..failures import EXIT_PORT_TAKEN, EXIT_REGROUP, RunError, UsageError
from . import listeners
from .cluster import Cluster, split

_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.01, 0.1  # tasks that were forked together come at about the same time
# For a host that does not answer at all. First calls wait less: one that finds neither a task's listener nor its
# server, as that is about to start, may stay without an answer.
_FIRST_CONNECT_SECONDS, _CONNECT_SECONDS = 0.05, 2.0
_LOG_AFTER_SECONDS = 5.0  # after which a waiting task logs what it waits for
_SERVER_SECONDS = 1.0  # head start of the chief's server
_LEFT_SECONDS = 10.0  # a task that has arrived always answers, except briefly as TensorFlow takes over
# The first message of an HTTP/2 server, as TensorFlow's: a frame of settings, here without any (RFC 9113, 3.4 and 6.5).
# Its first three bytes are its length. An acknowledgement of settings, which no server begins with, means: not ready.
_READY, _STARTING = (bytes((0, 0, 0, 4, flags, 0, 0, 0, 0)) for flags in (0, 1))
_ANSWERS = {_READY: "ready", _STARTING: "starting"}
_LONGEST_NOTE = 1 << 20


class ClusterError(RunError):
    """The cluster did not connect, and may when tried again. One line: the task, and the cure."""


class Wait:
    """A wait of a task for others: after five seconds it logs, once, what it waits for.

    Attributes:
      timeout_seconds: seconds that the wait may take, from now on.
      is_over: whether the wait has taken so long.
    """

    def __init__(self, task: str, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self._task, self._began, self._has_logged = task, time.monotonic(), False

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    @property
    def left_seconds(self) -> float:
        return self.timeout_seconds - self.seconds

    @property
    def is_over(self) -> bool:
        return self.left_seconds <= 0

    def log_progress(self, awaited: str) -> None:
        """Logs, once and after five seconds, that the awaited tasks are still missing."""
        if self._has_logged or time.monotonic() - self._began < _LOG_AFTER_SECONDS:
            return
        self._has_logged = True
        limit = f"cluster_timeout_seconds={self.timeout_seconds:g}"
        logging.warning("%s waits for %s, up to %s", self._task, awaited, limit)


class PortTakenError(ClusterError):
    """Another program has a port that Crankshaft chose, and no user named: it chooses another. One line."""

    exit_code = EXIT_PORT_TAKEN


class PreemptedError(ClusterError):
    """A peer's host has a notice of preemption, so that this attempt can't begin. One line."""

    exit_code = EXIT_REGROUP


def has_joined(cluster: Cluster) -> bool:
    """Returns whether this process has joined these tasks in an earlier run: its server stays until it ends.

    Raises `UsageError` where that run was of other tasks, or of servers, which end with it.
    """
    if "tensorflow" not in sys.modules:
        return False
    joined = import_module("crankshaft.engine.internals.tensorflow").joined_cluster()
    if joined not in (None, (cluster.index, tuple(address for _, address in cluster.addresses))):
        raise UsageError(
            f"{cluster.task} can't begin another run: its process keeps the workers of its first one, and with "
            "parameter servers they end with that; start a program for each run"
        )
    return joined is not None


def check_bindable(cluster: Cluster) -> None:
    """Tries to listen at this task's own address; warns if the host that it names is not this one.

    A container's port may be mapped, or a name be the cluster's, and peers still reach this process by it. TensorFlow's
    server listens at the port on all interfaces, whatever the host's name; that is what is tried. A port that an
    earlier process has just left (TIME_WAIT) is free.

    Raises `UsageError` where its port is in use, or is one that this user may not have, or where the supervisor has
    started another process as the task; `PortTakenError` where it is in use and Crankshaft chose it.
    """
    if cluster.is_chosen and (leader := os.getsid(0)) != os.getpid():  # a task leads its session, see `children`
        raise UsageError(
            f"{cluster.source}'s {cluster.task} is process {leader}, not this one; the task has started this one, "
            f"which inherits its variables; unset {cluster.source} for this one, or give it strategy=one_device"
        )
    if problem := _bind_problem(split(cluster.address)[0]):
        logging.warning(
            "%s's %s, this process, is at %s, %s; unless the others reach this process there (a mapped port, a "
            "cluster's name), correct the task's index or its address",
            *(cluster.source, cluster.task, cluster.address),
            problem,
        )
    _listen(cluster).close()


def _bind_problem(host: str) -> str:
    """Describes why a host seems not to be this one; empty if it is."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"a host that is not known here ({error.strerror})"
    if any(_is_local(family, sockaddr) for family, _, _, _, sockaddr in addresses):
        return ""
    return f"which is not this host ({socket.gethostname()})"


def _is_local(family: int, sockaddr: tuple) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(sockaddr)  # port 0: any free one
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


@contextlib.contextmanager
def _explained(cluster: Cluster):
    """Explains why this task's port can't be listened at."""
    try:
        yield
    except PermissionError:
        raise UsageError(
            f"{cluster.source}'s {cluster.task}, this process, is at {cluster.address}, a port that only root may use; "
            "use one from 1024 on"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"bind={cluster.bind} is not an address of this host; see `ip address`") from None
        in_use = (
            f"{cluster.source}'s {cluster.task}, this process, is at {cluster.address}, and that port is in use "
            f"({os.strerror(error.errno)})"
        )
        if cluster.is_chosen:
            raise PortTakenError(f"{in_use}; all tasks have to start again, with other ports") from None
        raise UsageError(
            f"{in_use}; end the process that has it, or use another port; if that is the task, which has started this "
            "process, give this one strategy=one_device"
        ) from None


def _listen(cluster: Cluster) -> socket.socket:
    with _explained(cluster):
        return listeners.listen(split(cluster.address)[1], only_here=cluster.is_on_one_host, at=cluster.bind)


@contextlib.contextmanager
def refuse_other_hosts(cluster: Cluster):
    """Keeps other hosts from the server that TensorFlow starts within, if the whole cluster is on this one."""
    with contextlib.ExitStack() as stack:
        if cluster.is_on_one_host:
            with _explained(cluster):
                stack.enter_context(listeners.only_this_host(split(cluster.address)[1]))
        yield


class Rendezvous:
    """Waits for the peers of this task, and within its context answers at its address that this task is here.

    Each task arrives twice: as it starts, and once it is ready for TensorFlow's server, which answers from then on. The
    chief's server starts first. The others' call it, and a call that came too early would be repeated only after a
    second (by TCP, RFC 6298, 2.1, and by gRPC as TensorFlow sets it in grpc_channel.cc).

    Attributes:
      callers: number of calls that were answered.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._greeting = _STARTING
        self.callers = 0
        self._chief_ready_at = math.inf  # when the chief was last ready
        self._seen: dict[tuple[str, str], float] = {}  # time of each peer's last answer

    def __enter__(self) -> Rendezvous:
        self._listener = _listen(self._cluster)
        # A thread, since this one waits for others meanwhile; a daemon, so that an error here is not kept from ending
        # the process.
        self._thread = threading.Thread(target=self._greet_callers, name="rendezvous", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._thread.join()
        self._listener.close()

    def announce(self, note: Mapping[str, Any]) -> None:
        """Sends callers a note, plain JSON, with the answer that this task is starting: see `call`."""
        self._greeting = _STARTING + json.dumps(note).encode()

    def _greet_callers(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                with self._listener.accept()[0] as caller, contextlib.suppress(OSError):
                    self.callers += 1
                    caller.sendall(self._greeting)

    def wait(self, timeout_seconds: float, *, ready: bool = False, new_attempt: bool = False) -> None:
        """Waits until every peer answers at its address; `ready` announces this task, and waits until all are ready.

        `new_attempt`: a peer whose TensorFlow server already answers is of an earlier attempt, which is about to end,
        and counts as absent: in this attempt no server starts before all tasks are ready, this one included.

        Raises:
          ClusterError: names the peers that have not come within `timeout_seconds`, or leave the job.
          UsageError: another task is at this one's address.
        """
        if ready:
            self._greeting = _READY
        # Two tasks with one index on one host would share the port, and each peer would reach either of them.
        elif answers(self._cluster.address) and not self.callers:  # this call itself would be one
            raise UsageError(
                f"{self._cluster.source} says that this process, on {socket.gethostname()}, is {self._cluster.task} at "
                f"{self._cluster.address}, where another task answers; give each task an index of its own"
            )
        wait, peers = Wait(self._cluster.task, timeout_seconds), self._cluster.peers
        while True:
            answer_seconds = max(_FIRST_CONNECT_SECONDS, min(wait.seconds / 4, wait.left_seconds, _CONNECT_SECONDS))
            calls = {peer: call(peer[1], answer_seconds) for peer in peers}
            if leaving := [peer for peer, (_, note) in calls.items() if note and leaves(note)]:
                raise PreemptedError(
                    f"{describe_peers(leaving)}: a notice of preemption has come before the first step"
                )
            replies = {peer: reply for peer, (reply, _) in calls.items()}
            if new_attempt:
                replies = {peer: reply if reply != "serving" else "" for peer, reply in replies.items()}
            here = [peer for peer in peers if (self._is_ready(peer, replies[peer]) if ready else replies[peer])]
            if len(here) == len(peers):
                return
            now = time.monotonic()
            self._seen |= {peer: now for peer in peers if replies[peer]}
            seen = self._seen
            # A peer that came and is silent has died: it would come back only by a restart of the whole job, so nobody
            # waits for the timeout.
            if left := [peer for peer in peers if now - seen.get(peer, now) > _LEFT_SECONDS]:
                raise ClusterError(missing_line(left, f"came, and has not answered for {_LEFT_SECONDS:g} s"))
            awaited = describe_peers([peer for peer in peers if peer not in here])
            wait.log_progress(f"{awaited} {'to be ready' if ready else 'to come'}")
            if wait.is_over:
                # Others give up at the same moment: a peer that left is to blame only if all came once.
                never = [peer for peer in peers if peer not in seen or (replies[peer] and peer not in here)]
                event = "did not come" if never else "came, left, and did not come back"
                away = never or [peer for peer in peers if peer not in here]
                raise ClusterError(missing_line(away, f"{event} within cluster_timeout_seconds={timeout_seconds:g}"))
            time.sleep(min(max(wait.seconds / 10, _FIRST_POLL_SECONDS), _POLL_SECONDS))

    def _is_ready(self, peer: tuple[str, str], answer: str | None) -> bool:
        """Whether this task may start its server, as far as a peer, with this answer, is concerned."""
        # The chief's server is called by all others as they start theirs, so it starts first, and they wait for it a
        # moment.
        if peer != self._cluster.addresses[0]:
            return answer in ("ready", "serving")
        now = time.monotonic()
        self._chief_ready_at = now if answer == "ready" else self._chief_ready_at
        return answer == "serving" or now - self._chief_ready_at > _SERVER_SECONDS


def missing_line(peers: Sequence[tuple[str, str]], event: str) -> str:
    """Describes peers, (name, address) each, that are missing, and the cure."""
    fix = f"start {'it' if len(peers) == 1 else 'them'}, or look at the output there"
    if any(answers(address, _POLL_SECONDS) is None for _, address in peers):
        fix = "it is stopped, or another program has the port"
    return f"{describe_peers(peers)} {event}; {fix}"


def describe_peers(peers: Sequence[tuple[str, str]]) -> str:
    """Describes tasks, (name, address) each, for people."""
    return " and ".join(f"{name} ({address})" for name, address in peers)


def answers(address: str, timeout_seconds: float = _CONNECT_SECONDS) -> str | None:
    """Asks a task at an address for its answer within so many seconds: "ready", "starting", or "serving".

    "": nothing listens there. None: something does, without such an answer, e.g. a stopped process, whose kernel still
    accepts connections.
    """
    return call(address, timeout_seconds)[0]


def call(address: str, timeout_seconds: float = _CONNECT_SECONDS) -> tuple[str | None, dict[str, Any] | None]:
    """Asks a task at an address for its answer, as `answers` does, and its note, if it announces one."""
    try:
        with socket.create_connection(split(address), timeout=timeout_seconds) as sock:
            # A caller's own port may be the port that it calls, so that it reaches itself.
            if sock.getsockname() == sock.getpeername():
                return "", None
            with contextlib.suppress(OSError):
                # Nine bytes of HTTP/2 are what a gRPC server sends first, unasked: whether it is one shows without
                # speaking gRPC.
                frame = sock.recv(9, socket.MSG_WAITALL)
                reply = _ANSWERS.get(frame, "serving" if frame[3:] == _READY[3:] else None)
                return reply, _note(sock) if frame == _STARTING else None
            return None, None
    except (OSError, UnicodeError):  # the latter: no host can have the name
        return "", None


def _note(sock: socket.socket) -> dict[str, Any] | None:
    """Reads a note up to its end; None without a whole one."""
    with sock.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
        note = json.loads(file.read(_LONGEST_NOTE))
        return note if isinstance(note, dict) else None
    return None


def leaves(note: Mapping[str, Any]) -> bool:
    """Returns whether the agent that announces a note leaves the job, as its host has a notice of preemption."""
    return note.get("leaves") is True


class Presence:
    """Observes whether a task has not answered for so many seconds, from the start on.

    Time in which this process did not observe it, as it was stopped itself, does not count.

    Attributes:
      came: whether the task has answered once.
    """

    def __init__(self, address: str, timeout_seconds: float):
        self._address = address
        self._timeout_seconds = timeout_seconds
        self.came = False
        self._away_seconds, self._checked_at = 0.0, time.monotonic()

    def is_gone(self) -> bool:
        here, now = answers(self._address), time.monotonic()
        self.came = self.came or bool(here)
        self._away_seconds = 0.0 if here else self._away_seconds + min(now - self._checked_at, 2 * _CONNECT_SECONDS)
        self._checked_at = now
        return self._away_seconds > self._timeout_seconds


@contextlib.contextmanager
def limited(timeout_seconds: float):
    """Ends this process with exit code 1 if the body takes over `timeout_seconds`, with its stacks on standard error.

    For the strategy's constructor, which would wait without end for a peer that died after it arrived, with Python's
    lock held. faulthandler's thread needs no lock. Must not nest with other uses of `dump_traceback_later`.
    """
    with open(os.dup(2), "wb") as stderr:  # `process.quiet_startup` within redirects descriptor 2
        faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
