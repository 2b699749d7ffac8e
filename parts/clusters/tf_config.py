"""Reads the tasks of a run from TF_CONFIG."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from ...runner.command_line import following
from ...runner.failures import UsageError
from ...runner.host.tasks import MARK, Cluster, make_cluster

NAME = "TF_CONFIG"

_FORM = 'it looks like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_JOBS = {  # in the order of TensorFlow's ids; of a parameter server's cluster the coordinator, called chief, is first
    "multi_worker": ("chief", "worker"),
    "parameter_server": ("chief", "worker", "ps", "evaluator"),
}
_NEEDED = {"multi_worker": (), "parameter_server": ("chief", "worker", "ps")}
_ALONE = ("chief", "evaluator")  # types with at most one task
_OTHERS = {
    "ps": "parameter servers belong to strategy=parameter_server; use that, or leave ps out",
    "evaluator": "an evaluator is not part of strategy=multi_worker, whose workers don't know of it; leave it out, or "
    f"give it {following.FLAGS}, by which it evaluates what it finds in run_dir",
}


def is_set(environment: Mapping[str, str]) -> bool:
    """Returns whether TF_CONFIG names tasks: services set it to {} for a single process."""
    return "".join(environment.get(NAME, "").split()) not in ("", "{}")


def has_servers(environment: Mapping[str, str]) -> bool:
    """Returns whether any of TF_CONFIG's tasks is a parameter server."""
    try:
        return bool(json.loads(environment[NAME])["cluster"].get("ps"))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False  # reading its tasks names the mistake


def from_environment(
    environment: Mapping[str, str], strategy: str = "multi_worker", has_evaluator: bool = False
) -> Cluster:
    """Reads the cluster that TF_CONFIG describes (https://www.tensorflow.org/guide/distributed_training#TF_CONFIG).

    Args:
      strategy: multi_worker, or parameter_server, which has more types of task.
      has_evaluator: whether there is an evaluator that its cluster does not have, as Vertex AI and Kubeflow start it.

    Raises `UsageError` for any mistake in it.
    """
    text = environment.get(NAME, "")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG={_short(text)} is not JSON ({error}); {_FORM}") from None
    if not isinstance(content, dict):
        raise UsageError(f"TF_CONFIG={_short(text)} is not an object; {_FORM}")
    kinds = _JOBS[strategy]
    jobs = _jobs(content, strategy)
    if has_evaluator and "evaluator" not in jobs:
        # Nobody calls it: any address that no other task has will do.
        host, taken = (
            str(jobs["chief"][0]).rpartition(":")[0],
            {str(address) for job in jobs.values() for address in job},
        )
        jobs["evaluator"] = [next(place for port in range(1, 1 << 16) if (place := f"{host}:{port}") not in taken)]
    kind, index = _task(content, jobs, kinds)
    addresses = [
        (job if job in _ALONE else f"{job} {number}", address)
        for job in kinds
        for number, address in enumerate(jobs.get(job, ()))
    ]
    before = kinds[: kinds.index(kind)]
    number = index + sum(len(jobs.get(job, ())) for job in before)
    # With the supervisor's mark, the addresses are its choice too.
    return dataclasses.replace(make_cluster(NAME, addresses, number, environment), is_chosen=MARK in environment)


def _jobs(content: dict, strategy: str) -> dict[str, list[str]]:
    if "sparseCluster" in content:
        raise UsageError(
            "TF_CONFIG has a sparseCluster, which lacks tasks; set enableDynamicWorker: false in the TFJob"
        )
    if "cluster" not in content:
        raise UsageError(f"TF_CONFIG has no cluster, only {_names(content)}; {_FORM}")
    jobs = content["cluster"]
    if not isinstance(jobs, dict):
        raise UsageError(f"TF_CONFIG's cluster={_short(jobs)} is not an object of task types; {_FORM}")
    if "chief" not in jobs:  # which has another name in TensorFlow 1, and in services that began with it
        jobs = {"chief" if job == "master" else job: addresses for job, addresses in jobs.items()}
    for job, addresses in jobs.items():
        if job not in (kinds := _JOBS[strategy]):
            fix = _OTHERS.get(job, f"use {', '.join(kinds)}")
            raise UsageError(f"TF_CONFIG's cluster has the task type {job!r}; {fix}")
        if not isinstance(addresses, list):
            raise UsageError(f"TF_CONFIG's cluster has {job}={_short(addresses)}, which is not a list; {_FORM}")
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    if not jobs:
        raise UsageError(f"TF_CONFIG's cluster is empty; {_FORM}")
    if len(jobs.get("chief", ())) > 1:
        raise UsageError(f"TF_CONFIG's cluster has {len(jobs['chief'])} chiefs; list one, and the others as workers")
    if len(jobs.get("evaluator", ())) > 1:
        raise UsageError(f"TF_CONFIG's cluster has {len(jobs['evaluator'])} evaluators; list one")
    for job in _NEEDED[strategy]:
        if job not in jobs:
            raise UsageError(
                f"TF_CONFIG's cluster has no {job}, only {_names(jobs)}; strategy={strategy} needs one chief (the "
                "coordinator, which is a task of its own), and worker and ps of one or more"
            )
    return jobs


def _task(content: dict, jobs: dict[str, list[str]], kinds: tuple[str, ...]) -> tuple[str, int]:
    """Returns (task type, index within it) of this process."""
    task = content.get("task")
    if not isinstance(task, dict):
        problem = f"task={_short(task)}, which is not an object" if "task" in content else "no task"
        raise UsageError(f"TF_CONFIG has {problem}: it must name which of the cluster's tasks this process is; {_FORM}")
    kind, index = task.get("type"), task.get("index")
    kind = "chief" if kind == "master" else kind
    if kind not in kinds:
        use = f"use {' or '.join(kinds)}"
        fix = _OTHERS.get(kind, use) if isinstance(kind, str) else use
        raise UsageError(f"TF_CONFIG's task has type={_short(kind)}; {fix}")
    if kind == "evaluator" and kind not in jobs:
        raise UsageError("TF_CONFIG's task is an evaluator, which its cluster lacks; give evaluator=true to all tasks")
    if kind not in jobs:
        raise UsageError(f"TF_CONFIG's task is a {kind}, but its cluster has only {_names(jobs)}; add {kind} to it")
    last = len(jobs[kind]) - 1
    use = "use index 0" if last == 0 else f"use 0 to {last}"
    if "index" not in task:
        raise UsageError(f"TF_CONFIG's task has no index; {use}")
    if not isinstance(index, int) or isinstance(index, bool):
        raise UsageError(f"TF_CONFIG's task has index={_short(index)}, which is not an integer; {use}")
    if not 0 <= index <= last:
        raise UsageError(f"TF_CONFIG's task has index={index}, and its cluster {last + 1} of {kind}; {use}")
    return kind, index


def _short(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _names(mapping: Mapping) -> str:
    return ", ".join(sorted(mapping)) or "nothing"
