"""A task arrives at its cluster: where it is, who has come and can come, and how it waits for its peers."""

from __future__ import annotations

import contextlib
import hmac
import os
import pathlib
import socket
import time
from collections.abc import Iterator

from ...engine import logging
from ...engine.errors import as_line
from ...engine.machine.files import file_system_time, open_regular, write_text
from ...runner.failures import UsageError
from ...runner.host import signals
from ...runner.host.tasks import SECRET, Cluster, counts, split
from . import rendezvous

_POLL_SECONDS = 1.0
_START_SECONDS = 120.0  # limit of TensorFlow's start on a busy machine
# After which a worker that has announced itself, and does so each second, has left: NFS shows times up to 60 s late.
_NOTE_SECONDS = 120.0
_CALL_SECONDS = 2.0
_OPEN = "TensorFlow's servers listen on all interfaces and trust whoever calls: close the tasks' ports to all others"
_NO_PROXY = "no_grpc_proxy"


def arrive(cluster: Cluster, timeout_seconds: float, awaits: bool = True) -> None:
    """Prints which task this process is, unless all are on this host, and waits until all hosts have addresses.

    The first task also logs who can reach them. A process that has joined its cluster in an earlier run is there.

    Args:
      awaits: whether all hosts are needed.

    Raises:
      UsageError: the host of a task has no address in time, or this process can't listen at its own.
    """
    if rendezvous.has_joined(cluster):
        return
    if not cluster.is_on_one_host:
        print(as_line(describe(cluster)), flush=True)
        if cluster.is_chief:
            print(_OPEN, flush=True)
        if awaits:
            wait_for_addresses(cluster, timeout_seconds)
    rendezvous.check_bindable(cluster)


def wait_for_addresses(cluster: Cluster, timeout_seconds: float) -> None:
    """Waits until each task's host has an address: names of Kubernetes' services appear with their pods.

    Raises:
      UsageError: a host has none in time.
    """
    wait = rendezvous.Wait(cluster.task, timeout_seconds)
    for name, address in cluster.addresses:
        host = split(address)[0]
        while True:
            try:
                socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                break
            except OSError as error:
                reason = error.strerror or str(error)
            wait.log_progress(f"{name}'s host, {host}, to have an address ({reason})")
            if wait.is_over:
                raise UsageError(
                    f"{cluster.source}'s {name} is at {address}, a host that has no address after "
                    f"cluster_timeout_seconds={timeout_seconds:g} ({reason}); correct its name, or start it"
                )
            time.sleep(_POLL_SECONDS)


def describe(cluster: Cluster) -> str:
    """Describes in a line which task this process is, of how many, and where that was read."""
    kinds = {kind: len(cluster.job(kind)) for kind in ("chief", "worker", "ps", "evaluator") if cluster.job(kind)}
    at = "" if cluster.kind == "evaluator" else f" at {cluster.address}"  # which nobody calls
    return f"cluster: {cluster.task}{at}, task {cluster.index} of {counts(kinds)}; from {cluster.source}"


def reach_directly(cluster: Cluster) -> None:
    """Makes this process's calls to the cluster's hosts pass by a proxy, which gRPC would ask. In every task.

    The variable replaces `no_proxy`, whose hosts it keeps (gRPC's http_proxy_mapper.cc).
    """
    hosts = (os.environ.get(_NO_PROXY) or os.environ.get("no_proxy") or "").split(",")
    hosts += [split(address)[0] for _, address in cluster.addresses]
    os.environ[_NO_PROXY] = ",".join(dict.fromkeys(filter(None, hosts)))


def announce(cluster: Cluster, folder: str) -> None:
    """Notes in a folder of the run that this worker serves at its address; to be repeated as long as it does."""
    with contextlib.suppress(OSError):  # this host does not share run_dir, or it is full
        os.makedirs(folder, exist_ok=True)
        if cluster.secret and not _is_signed(cluster, folder, cluster.address):
            write_text(os.path.join(folder, cluster.address), _signature(cluster, cluster.address))
        pathlib.Path(folder, cluster.address).touch()


def _signature(cluster: Cluster, address: str) -> str:
    return hmac.new(cluster.identity, address.encode(), "sha256").hexdigest()


def _is_signed(cluster: Cluster, folder: str, address: str) -> bool:
    """Returns whether the note of a worker at an address is by who has the job's secret."""
    with contextlib.suppress(OSError), open(open_regular(os.path.join(folder, address)), "rb") as file:
        return hmac.compare_digest(file.read(64), _signature(cluster, address).encode())
    return False


def newcomers(cluster: Cluster, folder: str) -> list[tuple[str, str]]:
    """Finds the workers that serve, by their notes in a folder, and that a coordinator's cluster lacks.

    Each as (name, "host:port"), with the name that it would have.
    """
    members, noted = {address for _, address in cluster.addresses}, dict[str, float]()
    with contextlib.suppress(OSError):  # there is no such folder
        noted = {note.name: note.stat().st_mtime for note in os.scandir(folder) if split(note.name)}
    # Before the clock of the file system is read, which writes a file.
    if not noted.keys() - members:
        return []
    # By the clock that has dated the notes: this host's may be a minute off.
    now = file_system_time(folder)
    calls = [
        ("", address)
        for address, at in sorted(noted.items())
        if now - at < _NOTE_SECONDS and address not in members
        if not cluster.secret or _is_signed(cluster, folder, address)
    ]
    # A note outlives its worker, so each has to answer as well.
    here = [call[1] for call, reply in rendezvous.call_all(calls, _CALL_SECONDS).items() if reply.answer == "serving"]
    return [(f"worker {number}", address) for number, address in enumerate(here, len(cluster.job("worker")))]


def with_newcomers(cluster: Cluster, folder: str) -> Cluster:
    """Adds the newcomers to a coordinator's cluster: in the places of workers that do not answer, and behind them."""
    workers, come = cluster.job("worker"), [address for _, address in newcomers(cluster, folder)]
    replies = rendezvous.call_all([("", address) for address in workers], _CALL_SECONDS) if come else {}
    # The coordinator would wait for an old address until its timeout.
    addresses = [come.pop(0) if come and not replies["", address].answer else address for address in workers]
    return cluster.with_workers([*addresses, *come], folder)


@contextlib.contextmanager
def waiting_for_peers(cluster: Cluster, timeout_seconds: float, elastic: bool) -> Iterator[None]:
    """Waits for the other processes, before TensorFlow is imported, which is done within, and afterwards."""
    with rendezvous.Rendezvous(cluster) as peers:
        in_step = not cluster.job("ps")
        peers.wait(timeout_seconds, new_attempt=in_step, elastic=elastic)
        if in_step and cluster.is_chief and not cluster.secret:
            logging.warning(
                "UDP heartbeats are not authenticated; set %s, the same random text for all workers", SECRET
            )
        # A task that hangs here answers its peers all the same.
        with rendezvous.limited(timeout_seconds + _START_SECONDS):
            yield
        peers.wait(timeout_seconds, ready=True)


@contextlib.contextmanager
def guarding_start(cluster: Cluster) -> Iterator[None]:
    """Prepares for TensorFlow's joining a cluster, which is done within and holds Python's lock; see above."""
    with contextlib.ExitStack() as stack:
        # All have come, so it takes moments, unless one ends now: TensorFlow would wait on, and for no SIGTERM.
        stack.enter_context(rendezvous.limited(_START_SECONDS))
        stack.enter_context(signals.keeping_sigterm())
        stack.enter_context(signals.ended_by_ctrl_c())
        stack.enter_context(rendezvous.refuse_other_hosts(cluster))
        yield
