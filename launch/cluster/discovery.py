"""Discovers the tasks of a run, and which of them this process is.

Sources, in this order: `--cluster_hosts`, TF_CONFIG, Slurm's environment, Kubernetes'. The first that names tasks is
used alone: nothing is completed from another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from ...engine.machine.files import file_system_time
from ...engine.strategies.registry import CLUSTERED
from ..failures import UsageError
from . import kubernetes, rendezvous, slurm, tf_config
from .tasks import Cluster, Tasks, counts, make_cluster, split

_POLL_SECONDS = 1.0
# After which a worker that has announced itself, and does so each second, has left: NFS shows times up to 60 s late.
_NOTE_SECONDS = 120.0
_CALL_SECONDS = 2.0
_OPEN = "TensorFlow's servers listen on all interfaces and trust whoever calls: close the tasks' ports to all others"


def cluster_from_flags(
    given: Mapping[str, Any], values: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[str, Cluster | None]:
    """Returns a run's strategy, and its cluster if that has several processes.

    Where no strategy is given, several tasks train as workers, or around their servers.

    Args:
      given: values of the flags that the caller gave.

    Raises:
      UsageError: the tasks are missing, too few, or named in two ways.
    """
    strategy, servers = values["strategy"], values["num_ps"]
    tasks = _tasks_from_flags(given, values, environment)
    has_config = tasks is None and tf_config.is_set(environment)
    if "strategy" not in given and strategy not in CLUSTERED and (tasks or has_config):
        has_servers = servers or (has_config and tf_config.has_servers(environment))
        strategy = "parameter_server" if has_servers else "multi_worker"
    if strategy not in CLUSTERED:
        return strategy, None
    if has_config:
        cluster = tf_config.from_environment(environment, strategy, values["evaluator"])
        started = tasks_from_scheduler(environment)
        if started and len(started.addresses) != len(cluster.addresses):
            raise UsageError(
                f"{tf_config.NAME} has {len(cluster.addresses)} tasks, and {started.source} {len(started.addresses)}; "
                f"unset {tf_config.NAME}, or start as many tasks as it has"
            )
    elif tasks is None:
        with_servers = " --ps=2" if strategy == "parameter_server" else ""
        raise UsageError(
            f"strategy={strategy} has several tasks, and none are known: TF_CONFIG is not set, there is no "
            "cluster_hosts, and this is not a step of Slurm's or a pod of Kubernetes'; `crankshaft local "
            f"--workers=2{with_servers} -- ...` starts them on this machine"
        )
    else:
        cluster = assign_kinds(tasks, servers, values["evaluator"], environment)
    return strategy, dataclasses.replace(cluster, bind=values["bind"] or "")


def _tasks_from_flags(
    given: Mapping[str, Any], values: Mapping[str, Any], environment: Mapping[str, str]
) -> Tasks | None:
    """Finds a run's tasks whose kinds are set by flags; None if TF_CONFIG sets them, or nothing does."""
    servers = values["num_ps"]
    has_config = tf_config.is_set(environment) and not values["cluster_hosts"]
    if values["evaluator"] and not servers and not (has_config and tf_config.has_servers(environment)):
        raise UsageError("evaluator is for num_ps=N parameter servers; add them, or leave it out")
    if values["strategy"] == "multi_worker" and servers and "strategy" in given:
        raise UsageError(f"num_ps={servers} is for strategy=parameter_server; use that, or leave one of them out")
    index = values["task_index"]
    if values["cluster_hosts"]:
        addresses = tuple(values["cluster_hosts"].split(","))
        if index is None or index >= len(addresses):
            state = " is missing" if index is None else f" is {index}"
            raise UsageError(
                f"cluster_hosts names {len(addresses)} tasks, and task_index{state}; give each task its own, 0 to "
                f"{len(addresses) - 1}"
            )
        return Tasks("cluster_hosts", addresses, index)
    if index is not None:
        raise UsageError(f"task_index={index} has no use without cluster_hosts; give that too")
    if has_config:
        if servers:
            raise UsageError(
                f"num_ps={servers} can't be combined with {tf_config.NAME}, which has the tasks' kinds; leave one out"
            )
        return None
    tasks = tasks_from_scheduler(environment)
    if tasks is None and servers:
        raise UsageError(f"num_ps={servers} needs tasks, and none are known; give cluster_hosts and task_index")
    if values["strategy"] == "parameter_server" and tasks and not servers:
        raise UsageError(f"{tasks.source} has {len(tasks.addresses)} tasks; give the number of servers by num_ps=N")
    return tasks


def tasks_from_scheduler(environment: Mapping[str, str]) -> Tasks | None:
    """Finds the tasks that a scheduler started together with this process; None without one, or for a single task.

    Raises:
      UsageError: a scheduler's variables are wrong, or two schedulers have different numbers of tasks.
    """
    both = [slurm.tasks(environment), kubernetes.tasks(environment)]
    discovered = [tasks for tasks in both if tasks and len(tasks.addresses) > 1]
    if len({len(tasks.addresses) for tasks in discovered}) > 1:
        raise UsageError(
            f"{' and '.join(f'{tasks.source} has {len(tasks.addresses)} tasks' for tasks in discovered)}; give "
            "cluster_hosts and task_index, or unset the variables of one"
        )
    return discovered[0] if discovered else None


def assign_kinds(tasks: Tasks, num_ps: int, evaluator: bool, environment: Mapping[str, str]) -> Cluster:
    """Gives each task its kind: the coordinator (chief), workers, servers, an evaluator, in this order.

    Without servers all are workers. Raises `UsageError` where they are too few.
    """
    count = len(tasks.addresses)
    names = [f"worker {i}" for i in range(count)]
    if num_ps:
        workers = count - 1 - num_ps - evaluator
        if workers < 1:
            more = " and an evaluator" if evaluator else ""
            raise UsageError(
                f"{tasks.source} has {count} tasks, too few for a coordinator, a worker, num_ps={num_ps} "
                f"servers{more}; start {num_ps + 2 + evaluator} or more"
            )
        names = ["chief", *(f"worker {i}" for i in range(workers)), *(f"ps {i}" for i in range(num_ps))]
        names += ["evaluator"] * evaluator
    return make_cluster(tasks.source, list(zip(names, tasks.addresses, strict=True)), tasks.index, environment)


def announce(cluster: Cluster, folder: str) -> None:
    """Notes in a folder of the run that this worker serves at its address; to be repeated as long as it does."""
    with contextlib.suppress(OSError):  # this host does not share run_dir, or it is full
        os.makedirs(folder, exist_ok=True)
        pathlib.Path(folder, cluster.address).touch()


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
        ("", address) for address, at in sorted(noted.items()) if now - at < _NOTE_SECONDS and address not in members
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


def describe(cluster: Cluster) -> str:
    """Describes in a line which task this process is, of how many, and where that was read."""
    kinds = {kind: len(cluster.job(kind)) for kind in ("chief", "worker", "ps", "evaluator") if cluster.job(kind)}
    at = "" if cluster.kind == "evaluator" else f" at {cluster.address}"  # which nobody calls
    return f"cluster: {cluster.task}{at}, task {cluster.index} of {counts(kinds)}; from {cluster.source}"


def arrive(cluster: Cluster, timeout_seconds: float, awaits: bool = True) -> None:
    """Prints which task this process is, unless all are on this host, and waits until all hosts have addresses.

    The first task also logs who can reach them. `awaits`: whether all hosts are needed.
    """
    if not cluster.is_on_one_host:
        print(describe(cluster), flush=True)
        if cluster.is_chief:
            print(_OPEN, flush=True)
        if awaits:
            wait_for_addresses(cluster, timeout_seconds)


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
