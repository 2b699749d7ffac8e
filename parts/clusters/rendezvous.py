"""The rendezvous of a run's tasks: waits for the peers before TensorFlow starts, and answers them.

TensorFlow's constructor of a multi-worker strategy waits for all tasks without end, and holds Python's lock meanwhile:
no thread and no signal handler runs. So the peers are awaited here, before it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import hmac
import json
import math
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ...engine import logging
from ...engine.errors import visible
from ...runner.failures import EXIT_PORT_TAKEN, EXIT_REGROUP, EXIT_USAGE, CrankshaftError, RunError, UsageError
from ...runner.host.tasks import SECRET, Cluster, split
from . import listeners

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
# The caller then asks for a note, by a nonce and the address that it calls, in a frame of a type that HTTP/2 does not
# know; the task's note follows in such a frame: a signature of the question and the note, and JSON.
_NOTE_TYPE, _NONCE_BYTES, _SIGNATURE_BYTES = bytes((0xF0, 0, 0, 0, 0, 0)), 16, 32
_MOST_CALLERS = 256  # that a task awaits the questions of
_MOST_CALLS = 128  # side by side, for the limit of open files
_REFUSAL_SECONDS = 5.0  # how long a task that can't start lets its peers know why
_SHOWN_CHARACTERS = 300  # of another task's words
_REQUEUE = "requeue the job, which then has other ports, or have Slurm reserve some by srun --resv-ports"


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
    """Another program has a port that Crankshaft or Slurm chose, and no user named: the tasks get others. One line."""

    exit_code = EXIT_PORT_TAKEN


class PreemptedError(ClusterError):
    """A peer leaves before the first step, so that this attempt can't begin. One line."""

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


class RefusedError(UsageError):
    """A peer has found a mistake as it started. One line: the peer, and its own line."""


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
    for family, _, _, _, sockaddr in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(sockaddr)  # port 0: any free one
                return ""
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    return ""
    return f"which is not this host ({socket.gethostname()})"


@contextlib.contextmanager
def _explained(cluster: Cluster):
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
            f"({error.strerror})"
        )
        if cluster.is_chosen:
            raise PortTakenError(f"{in_use}; all tasks have to start again, with other ports") from None
        if cluster.job_id:
            raise PortTakenError(f"{in_use}; {_REQUEUE}") from None
        if cluster.port_seconds:
            raise ClusterError(f"{in_use}, as another program took it between attempts; end that") from None
        raise UsageError(
            f"{in_use}; end the process that has it, or use another port; if that is the task, which has started this "
            "process, give this one strategy=one_device"
        ) from None


def _listen(cluster: Cluster) -> socket.socket:
    wait = Wait(cluster.task, cluster.port_seconds)
    while True:
        try:
            with _explained(cluster):
                return listeners.listen(split(cluster.address)[1], only_here=cluster.is_on_one_host, at=cluster.bind)
        except ClusterError as error:
            if wait.is_over or isinstance(error, PortTakenError):
                raise
            wait.log_progress(f"its own port, {cluster.address}, which another program has")
        time.sleep(_POLL_SECONDS)


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

    An answer has a note, plain JSON, signed for this job and the caller: which task of it answers, on which host, and
    which peers it does not reach. One that another job signed, or nobody, is a mistake. In a job with a secret it is
    none, as is that of a task at another address; and where a scheduler's job has chosen the ports, as that of another
    job may have chosen the same.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._strangers: dict[tuple[str, str], float] = {}  # since when another job's task answers for each peer
        self._frame = _STARTING
        self._process = secrets.token_hex(8)
        self._note: dict[str, Any] = {"misses": [address for _, address in cluster.peers]}
        self._chief_ready_at = math.inf  # when the chief was last ready
        self._seen: dict[tuple[str, str], float] = {}  # time of each peer's last answer
        self._reached_by: dict[tuple[str, str], bool] = {}  # whether each peer that came has reached this task
        self._replies: dict[tuple[str, str], Reply] = {}

    def __enter__(self) -> Rendezvous:
        self.announce({})
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
        """Adds to the note that callers get; see `call`."""
        cluster = self._cluster
        task = {"task": cluster.task, "address": cluster.address, "host": socket.gethostname()}
        self._note |= {**task, "process": self._process, **note}
        self._body = json.dumps(self._note).encode()

    def _greet_callers(self) -> None:
        """Sends each caller the frame at once, and the note once it asks: one that is silent delays no other."""
        callers = dict[int, tuple[socket.socket, float]]()  # and until when each may ask, in the order of their coming
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                ready = {number for number, _ in poll.poll(1000)}
                for number in callers.keys() & ready:
                    with contextlib.suppress(OSError):
                        self._answer(callers[number][0])
                now, surplus = time.monotonic(), [*callers][: max(0, len(callers) - _MOST_CALLERS)]
                left = [number for number, (_, until) in callers.items() if number in ready or now > until]
                for number in {*left, *surplus}:
                    poll.unregister(number)
                    callers.pop(number)[0].close()
                if self._listener.fileno() in ready:
                    caller = self._listener.accept()[0]
                    caller.setblocking(False)
                    callers[caller.fileno()] = caller, now + _CONNECT_SECONDS
                    poll.register(caller, select.POLLIN)
                    with contextlib.suppress(OSError):
                        caller.sendall(self._frame)
        for caller, _ in callers.values():
            caller.close()

    def _answer(self, caller: socket.socket) -> None:
        """Sends the note, if a caller asks for it. Raises OSError."""
        asked, body = caller.recv(1 << 12), self._body
        if asked[3:9] == _NOTE_TYPE and int.from_bytes(asked[:3], "big") == len(asked) - 9:
            signed = _framed(hmac.digest(self._cluster.identity, asked + body, "sha256") + body)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(signed))  # which takes it at once
            caller.sendall(signed)

    def ask(self, timeout_seconds: float) -> dict[tuple[str, str], Reply]:
        """Asks all peers for their answers, and announces which of them do not answer.

        Raises:
          UsageError: a task answers that is another than the cluster names.
        """
        replies = call_all(self._cluster.peers, timeout_seconds, self._cluster.identity)
        if self._cluster.secret or self._cluster.job_id:
            notes = {peer: reply for peer, reply in replies.items() if reply.note}
            strangers = [
                peer for peer, it in notes.items() if not (it.is_peers if self._cluster.secret else it.is_signed)
            ]
            self._strangers = {peer: self._strangers.get(peer, time.monotonic()) for peer in strangers}
            replies |= dict.fromkeys(strangers, Reply())
        self._replies = replies
        for peer, reply in replies.items():
            self._check_identity(peer, reply)
            if reply.note:
                reaches = self._cluster.address not in missed(reply.note)
                self._reached_by[peer] = reaches or self._reached_by.get(peer, False)
        self.announce({"misses": [peer[1] for peer, reply in replies.items() if not reply.answer]})
        return replies

    def _check_identity(self, peer: tuple[str, str], reply: Reply) -> None:
        """Raises `UsageError` if the task that answers is not the peer, by its own words."""
        if reply.note is None or reply.is_peers:
            return
        there, address, process, host = (
            _shown(reply.note.get(name)) for name in ("task", "address", "process", "host")
        )
        this = (
            f"{describe_peers([(self._cluster.task, self._cluster.address)])}, this process on {socket.gethostname()}"
        )
        which = describe_peers([peer])
        if not reply.is_signed:
            raise UsageError(
                f"{this}, calls {which}, where {there} ({address}) of another job or another list of tasks answers, on "
                f"{host}; give all tasks of a job one list, spelled alike, and one {SECRET}, and each job its own ports"
            )
        answering = "this process itself" if process == self._process else f"{there}, on {host},"
        raise UsageError(
            f"{this}, calls {which}, where {answering} answers; give each task an index of its own, and each address "
            "to one task"
        )

    def look(self) -> None:
        """Looks once who starts at the tasks' addresses, before this task answers itself.

        Raises:
          UsageError: another task is at this one's address, or a peer's.
        """
        reply = call(self._cluster.address)
        if reply.note:  # a server may be that of an earlier attempt, which is about to end
            self._check_own_address(reply)
        self.ask(_CONNECT_SECONDS)

    def _check_own_address(self, reply: Reply) -> None:
        """Raises `UsageError` if another process than this one has answered at this task's address."""
        note = reply.note or {}
        if reply.answer and note.get("process") != self._process:
            host = f"on {_shown(note['host'])}" if "host" in note else "by TensorFlow's server"
            raise UsageError(
                f"{self._cluster.source} says that this process, on {socket.gethostname()}, is {self._cluster.task} at "
                f"{self._cluster.address}, where another task answers, {host}; give each task an index of its own"
            )

    def wait(
        self, timeout_seconds: float, *, ready: bool = False, new_attempt: bool = False, elastic: bool = False
    ) -> None:
        """Waits until every peer answers at its address; `ready` announces this task, and waits until all are ready.

        `new_attempt`: a peer whose TensorFlow server already answers is of an earlier attempt, which is about to end,
        and counts as absent: in this attempt no server starts before all tasks are ready, this one included. `elastic`:
        others may begin an attempt without a peer that refuses to start.

        Raises:
          ClusterError: names the peers that have not come within `timeout_seconds`, or leave the job.
          PortTakenError: another job has the port of a peer that a scheduler's job has chosen.
          UsageError: another task is at this one's address, or a peer's, or a peer has found a mistake.
        """
        wait, peers = Wait(self._cluster.task, timeout_seconds), self._cluster.peers
        if ready:
            self._frame = _READY
            self.announce({})
        else:
            self._check_own_address(call(self._cluster.address, min(timeout_seconds, _CONNECT_SECONDS)))
        while True:
            answer_seconds = max(_FIRST_CONNECT_SECONDS, min(wait.seconds / 4, wait.left_seconds, _CONNECT_SECONDS))
            calls = self.ask(answer_seconds)
            for peer, reply in calls.items():
                if reason := refusal(reply.note):
                    line = f"{describe_peers([peer])} has not started: {reason}"
                    raise PreemptedError(line) if elastic else RefusedError(line)
            if leaving := [peer for peer, reply in calls.items() if reply.note and leaves(reply.note)]:
                raise PreemptedError(
                    f"{describe_peers(leaving)}: a notice of preemption has come before the first step"
                )
            replies = {
                peer: "" if new_attempt and reply.answer == "serving" else reply.answer for peer, reply in calls.items()
            }
            here = [peer for peer in peers if (self._is_ready(peer, replies[peer]) if ready else replies[peer])]
            if len(here) == len(peers):
                return
            now = time.monotonic()
            self._seen |= {peer: now for peer in peers if replies[peer]}
            seen = self._seen
            # A peer that came and is silent has died: it would come back only by a restart of the whole job, so nobody
            # waits for the timeout.
            if left := [peer for peer in peers if now - seen.get(peer, now) > _LEFT_SECONDS]:
                raise ClusterError(self.missing_line(left, f"came, and has not answered for {_LEFT_SECONDS:g} s"))
            awaited = describe_peers([peer for peer in peers if peer not in here])
            wait.log_progress(f"{awaited} {'to be ready' if ready else 'to come'}")
            taken = [peer for peer, since in self._strangers.items() if now - since > _LEFT_SECONDS]
            if taken and self._cluster.job_id:
                raise PortTakenError(f"{describe_peers(taken)}: a task of another job answers there; {_REQUEUE}")
            if wait.is_over:
                # Others give up at the same moment: a peer that left is to blame only if all came once.
                never = [peer for peer in peers if peer not in seen or (replies[peer] and peer not in here)]
                event = "did not come" if never else "came, left, and did not come back"
                away = never or [peer for peer in peers if peer not in here]
                line = self.missing_line(away, f"{event} within cluster_timeout_seconds={timeout_seconds:g}")
                is_taken = any(calls[peer].answer in (None, "serving") or peer in self._strangers for peer in never)
                if self._cluster.job_id and is_taken:
                    raise PortTakenError(f"{line}; {_REQUEUE}")
                raise ClusterError(line)
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

    def missing_line(self, peers: Sequence[tuple[str, str]], event: str) -> str:
        """Describes peers that are missing, and the cure, by their last replies."""
        task, address, replies = self._cluster.task, self._cluster.address, self._replies
        ports = " and ".join(sorted({peer[1].rpartition(":")[2] for peer in peers}))
        it, starts = ("it", "start it") if len(peers) == 1 else ("them", "start them")
        if any(self._reached_by.get(peer) is False for peer in peers):
            fix = (
                f"what it sends does not reach {task} ({address}), this process: let TCP and UDP in here at port "
                f"{split(address)[1]}, and out there"
            )
        elif strangers := [peer for peer in peers if peer in self._strangers]:
            fix = (
                f"a task answers at {describe_peers(strangers)}, of another job or another list of tasks: give all "
                f"tasks of a job one list, spelled alike, and one {SECRET}, each an index and an address of its own"
            )
        elif any(replies[peer].answer is None for peer in peers):
            fix = "it is stopped, or another program has the port"
        elif any(replies[peer].answer == "serving" for peer in peers):
            fix = "a task of another job, or of an earlier attempt that has not ended, is at its port: end it"
        elif any(replies[peer].is_dropped for peer in peers):
            fix = f"no host answers there: {starts}, or let TCP and UDP pass to {it} at port {ports}, and back"
        else:
            fix = f"{starts}, or look at the output there"
        return f"{describe_peers(peers)} {event}; {fix}"


@contextlib.contextmanager
def refusing(cluster: Cluster | None) -> Iterator[None]:
    """Lets peers that wait for this task know the mistake that ends it within, for a few seconds.

    A supervisor that has started the tasks ends them itself.
    """
    try:
        yield
    except CrankshaftError as error:
        # Workers in step all read a refusal; around servers the coordinator alone does.
        is_news = not isinstance(error, RefusedError) or (cluster and cluster.job("ps"))
        if cluster and not cluster.is_chosen and error.exit_code == EXIT_USAGE and is_news:
            with contextlib.suppress(CrankshaftError), Rendezvous(cluster) as here:  # else its port is in use
                here.announce({"refuses": error.message[:_SHOWN_CHARACTERS]})
                until, met = time.monotonic() + _REFUSAL_SECONDS, set[tuple[str, str]]()
                while time.monotonic() < until:
                    waiting = {peer for peer, reply in call_all(cluster.peers, _POLL_SECONDS).items() if reply.answer}
                    met |= waiting
                    if len(met) == len(cluster.peers) and not waiting:
                        break
                    time.sleep(_POLL_SECONDS)
        raise


def describe_peers(peers: Sequence[tuple[str, str]]) -> str:
    """Describes tasks, (name, address) each, for people."""
    return " and ".join(f"{name} ({address})" for name, address in peers)


class Reply(NamedTuple):
    """The answer at an address.

    Attributes:
      answer: "ready", "starting", or "serving" of TensorFlow's server. "": nothing listens there. None: something does,
        without such an answer, e.g. a stopped process, whose kernel still accepts connections.
      note: what the task announces.
      is_signed: whether the note is of the caller's job.
      is_peers: whether it is, and of the task at the address that was called.
      is_dropped: whether not even a refusal came back.
    """

    answer: str | None = ""
    note: Mapping[str, Any] | None = None
    is_signed: bool = False
    is_peers: bool = False
    is_dropped: bool = False


def answers(address: str, timeout_seconds: float = _CONNECT_SECONDS) -> str | None:
    """Asks a task at an address for its answer within so many seconds; see `Reply`."""
    return call(address, timeout_seconds).answer


def call(address: str, timeout_seconds: float = _CONNECT_SECONDS, identity: bytes = b"") -> Reply:
    """Asks a task at an address for its answer and its note."""
    peer = ("", address)
    return call_all([peer], timeout_seconds, identity)[peer]


def call_all(
    peers: Sequence[tuple[str, str]], timeout_seconds: float, identity: bytes = b""
) -> dict[tuple[str, str], Reply]:
    """Asks tasks, (name, address) each, side by side, at all addresses of their hosts' names.

    Not by threads: one that has just looked up a name may hold a lock of the C library in the next fork.

    Args:
      timeout_seconds: for the answers, once all names are looked up.
      identity: the job's, by which notes are signed.
    """
    replies: dict[tuple[str, str], Reply] = {}
    for first in range(0, len(peers), _MOST_CALLS):
        with contextlib.ExitStack() as stack:
            called = peers[first : first + _MOST_CALLS]
            calls = [
                _Call(peer, sock, bytearray(), question(peer[1])) for peer in called for sock in _connect(peer, stack)
            ]
            replies |= _receive(calls, time.monotonic() + timeout_seconds, identity)
    return {peer: replies.get(peer, Reply()) for peer in peers}


class _Call(NamedTuple):
    peer: tuple[str, str]
    sock: socket.socket
    received: bytearray
    asked: bytes


def question(address: str) -> bytes:
    """Makes what a caller asks the task at an address: no answer to another question is one to this."""
    return _framed(secrets.token_bytes(_NONCE_BYTES) + address.encode())


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + _NOTE_TYPE + data


def _connect(peer: tuple[str, str], stack: contextlib.ExitStack) -> Iterator[socket.socket]:
    """Begins to connect to a task at each address of its host."""
    try:
        found = socket.getaddrinfo(*split(peer[1]), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: no host can have the name
        return
    for family, sockaddr in dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found):
        with contextlib.suppress(OSError):  # no such family here, or too many files are open
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setblocking(False)
            # A caller's own port may be the port that it calls, so that it reaches itself.
            if sock.connect_ex(sockaddr) in (0, errno.EINPROGRESS) and sock.getsockname() != sockaddr:
                yield sock


def _receive(calls: Sequence[_Call], until: float, identity: bytes) -> dict[tuple[str, str], Reply]:
    """Receives the answers to calls, up to a time of the monotonic clock; the first of a host's addresses counts."""
    replies: dict[tuple[str, str], Reply] = {}
    poll, waiting = select.poll(), {made.sock.fileno(): made for made in calls}
    for number in waiting:
        poll.register(number, select.POLLIN)
    while waiting and (left := until - time.monotonic()) > 0:
        for number in [number for number, _ in poll.poll(left * 1000) if number in waiting]:
            peer, sock, received, asked = waiting[number]
            try:
                received += (data := sock.recv(1 << 16))
                if bytes(received[:9]) in _ANSWERS and len(received) - len(data) < 9:
                    sock.sendall(asked)
                reply = parse(received, identity, asked) if data else Reply(None)
            except BlockingIOError:
                continue
            except OSError as error:
                # A reset comes from a listener that was there, a refusal from none.
                reply = Reply(None if isinstance(error, ConnectionResetError) else "")
            if reply is None:
                continue
            if reply.answer or not replies.get(peer):
                replies[peer] = reply
            # One address of a host that answers is enough; the others may answer where one refuses.
            for done in [number] if not reply.answer else [n for n, made in waiting.items() if made.peer == peer]:
                poll.unregister(done)
                waiting.pop(done, None)
    for peer, sock, _, _ in waiting.values():
        try:
            sock.getpeername()
            replies[peer] = Reply(None)
        except OSError:  # it is not connected
            replies.setdefault(peer, Reply(is_dropped=True))
    return replies


def parse(data: bytes | bytearray, identity: bytes, asked: bytes) -> Reply | None:
    """Parses what has come of an answer to a question; None if more has to."""
    frame, header, rest = bytes(data[:9]), data[9:18], bytes(data[18:])
    if len(frame) < len(_READY):
        return None
    if frame not in _ANSWERS:
        return Reply("serving" if frame[3:] == _READY[3:] else None)
    if len(header) < len(_READY) or len(rest) < int.from_bytes(header[:3], "big"):
        return None
    signature, body = rest[:_SIGNATURE_BYTES], rest[_SIGNATURE_BYTES:]
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(note := json.loads(body), dict):
            is_signed = hmac.compare_digest(signature, hmac.digest(identity, asked + body, "sha256"))
            is_here = str(note.get("address")).encode() == asked[9 + _NONCE_BYTES :]
            return Reply(_ANSWERS[frame], note, is_signed, is_signed and is_here)
    return Reply(None)


def _shown(words: object) -> str:
    """Another task's words, for people."""
    return visible(str(words)[:_SHOWN_CHARACTERS])


def missed(note: Mapping[str, Any]) -> Sequence[str]:
    """Returns the addresses of the peers that the task that announces a note does not reach."""
    addresses = note.get("misses")
    return addresses if isinstance(addresses, list) else ()


def refusal(note: Mapping[str, Any] | None) -> str:
    """Returns why the task that announces a note does not start; empty if it does."""
    return _shown(note["refuses"]) if note and "refuses" in note else ""


def leaves(note: Mapping[str, Any]) -> bool:
    """Returns whether the agent that announces a note leaves the job, as its host has a notice of preemption."""
    return note.get("leaves") is True


class Presence:
    """Observes whether a task has not answered for so many seconds, from the start on.

    Time in which this process did not observe it, as it was stopped itself, does not count.

    Attributes:
      came: whether the task has answered once.
      refusal: why it does not start; empty if it does.
    """

    def __init__(self, address: str, timeout_seconds: float, identity: bytes = b""):
        self._address, self._identity = address, identity
        self._timeout_seconds = timeout_seconds
        self.came, self.refusal = False, ""
        self._away_seconds, self._checked_at = 0.0, time.monotonic()

    def is_gone(self) -> bool:
        reply = call(self._address, identity=self._identity)
        is_stranger = self._identity and reply.note and not reply.is_peers
        here, now = "" if is_stranger else reply.answer, time.monotonic()
        self.refusal = refusal(reply.note) if reply.is_peers else ""
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
