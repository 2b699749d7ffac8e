"""Reads the tasks of a run from the environment of a pod of Kubernetes' Indexed Jobs, or of a JobSet's.

The pods of a Job with `completionMode: Indexed` and a `subdomain` have names, `JOB-INDEX.SUBDOMAIN`, which a headless
Service of the subdomain's name answers for (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication).
A pod does not know the number of tasks and their Jobs: `CRANKSHAFT_JOBS` in the template has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...runner.failures import UsageError
from ...runner.host.tasks import MOST_TASKS, Tasks

JOBS = "CRANKSHAFT_JOBS"  # train:8, or train-chief:1,train-worker:4,train-ps:2: Jobs and their pods, in tasks' order
SERVICE = "CRANKSHAFT_SERVICE"  # the headless Service's name, which is the pods' subdomain
PORT = 2222
_JOB = re.compile(r"([a-z0-9](?:[a-z0-9-]*[a-z0-9])?):([1-9]\d{0,3})")


def tasks(environment: Mapping[str, str]) -> Tasks | None:
    """Reads the tasks of the Jobs that this pod is one of; None outside of them.

    Raises:
      UsageError: a variable is missing or has another form, or this pod is none of the Jobs'.
    """
    text = environment.get(JOBS, "")
    if not text:
        return None
    service, index, host = (environment.get(name, "") for name in (SERVICE, "JOB_COMPLETION_INDEX", "HOSTNAME"))
    if not service:
        raise UsageError(f"{JOBS}={text} is set, and {SERVICE} is not; set it to the headless Service's name")
    if not index.isdecimal():
        raise UsageError(
            f"{JOBS}={text} is set, and JOB_COMPLETION_INDEX={index!r} is not a number; use an Indexed Job"
        )
    names: list[str] = []
    for part in text.split(","):
        if not (match := _JOB.fullmatch(part.strip())):
            raise UsageError(f"{JOBS}={text} is not a list of Jobs and their pods such as train:8")
        # Before the names are made, since a mistake may mean millions.
        if len(names) + int(match[2]) > MOST_TASKS:
            raise UsageError(
                f"{JOBS}={text} has more than {MOST_TASKS:,} pods; set it to the Jobs' names and completions"
            )
        names += [f"{match[1]}-{number}" for number in range(int(match[2]))]
    if host not in names or not host.endswith(f"-{index}"):
        raise UsageError(
            f"this pod is {host}, of index {index}, and {JOBS}={text} has {names[0]} to {names[-1]}; set it to the "
            "Jobs' names and completions"
        )
    return Tasks("Kubernetes", tuple(f"{name}.{service}:{PORT}" for name in names), names.index(host))
