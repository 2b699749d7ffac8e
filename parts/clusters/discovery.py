"""Discovers the tasks of a run, and which of them this process is.

Sources, in this order: `--cluster_hosts`, TF_CONFIG, the environment of each of `SCHEDULERS`. The first that names
tasks is used alone: nothing is completed from another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...engine.strategies.registry import CLUSTERED
from ...runner.command_line import following
from ...runner.failures import UsageError
from ...runner.host.tasks import SCHEDULERS, Cluster, Tasks, make_cluster
from . import tf_config


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


def has_tasks(values: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Returns whether several tasks are named by a flag, or by the environment."""
    return bool(values["cluster_hosts"] or tf_config.NAME in environment or tasks_from_scheduler(environment))


def _tasks_from_flags(
    given: Mapping[str, Any], values: Mapping[str, Any], environment: Mapping[str, str]
) -> Tasks | None:
    """Finds a run's tasks whose kinds are set by flags; None if TF_CONFIG sets them, or nothing does."""
    servers = values["num_ps"]
    has_config = tf_config.is_set(environment) and not values["cluster_hosts"]
    if values["evaluator"] and not servers and not (has_config and tf_config.has_servers(environment)):
        raise UsageError(
            "evaluator is for num_ps=N parameter servers; add them, or leave it out, and evaluate beside the run by "
            f"{following.FLAGS}"
        )
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
    named = [reader for variable, reader in SCHEDULERS.items() if variable in environment]
    readers = [import_module(f".{x}", __package__).tasks if isinstance(x, str) else x for x in named]
    discovered = [tasks for read in readers if (tasks := read(environment)) and len(tasks.addresses) > 1]
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
    addresses = list(zip(names, tasks.addresses, strict=True))
    return make_cluster(tasks.source, addresses, tasks.index, environment, tasks.job_id)
