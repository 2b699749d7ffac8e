"""Writes Kubernetes' objects for a cluster: Indexed Jobs with a headless Service, or a JobSet.

https://kubernetes.io/docs/concepts/workloads/controllers/job, https://jobset.sigs.k8s.io.
"""

from __future__ import annotations

from typing import Any

from ..cluster.cluster import SECRET, counts
from ..cluster.kubernetes import JOBS, PORT, SERVICE
from ..errors import EXIT_DIVERGED, EXIT_TERMINATED, EXIT_USAGE, UsageError
from .job import Job

_RESTARTS = 6  # of each task
_GRACE_SECONDS = 120  # for a checkpoint
_USER = 1000
_HEAD = """\
# {name}: {tasks}. Kubernetes 1.29 or later.
#
# Workers sign their messages to each other if a secret of this name exists:
#   kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)
---
# The volume of all runs: omit this object if the volume exists. Deleting it deletes the runs.
"""
_COMMENTS = {  # each once, above the first line that begins so
    "policyTypes:": "To each other alone: TensorFlow's servers execute anybody's requests.",
    "publishNotReadyAddresses:": "Tasks wait for each other before they are ready.",
    "failurePolicy:": "The Jobs restart their pods.",
    "backoffLimit:": f"A worker that fails ends the others too, and each counts: {_RESTARTS} restarts of all.",
    "backoffLimitPerIndex:": "Each task is started again by itself.",
    "podReplacementPolicy:": "Not before the old pod is gone: TensorFlow takes no two tasks of one index.",
    "- action: FailJob": "A mistake, or a run that diverged, which a restart would repeat.",
    "- action: Ignore": "A disruption, or SIGTERM: the task has saved.",
    "terminationGracePeriodSeconds:": "For a checkpoint.",
    "- name: CRANKSHAFT_JOBS": "By these two a pod finds the others.",
    "- name: HOME": "The root can't be written to.",
    "startupProbe:": "TensorFlow's server sends a greeting to every caller, unless its process is stopped.",
    "- name: shm": "For NCCL.",
}
# Not tcpSocket, which the kernel answers for a process that is stopped.
_PROBE = f"import socket; socket.create_connection(('localhost', {PORT}), 5).recv(1) or exit(1)"
_STR = "tag:yaml.org,2002:str"
_DOCKERFILE = f"""\
FROM python:3.11-slim
RUN useradd --uid {_USER} --create-home user
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src
USER {_USER}
WORKDIR /home/user
"""


def dockerfile() -> str:
    """Returns a Dockerfile that makes an image of a checkout, for an ordinary user."""
    return _DOCKERFILE


def manifest(job: Job, as_job_set: bool) -> str:
    """Returns the objects as YAML. Raises `UsageError` where PyYAML is missing."""
    try:
        import yaml
    except ImportError:
        raise UsageError("a manifest needs PyYAML: pip install crankshaft[yaml]") from None

    # Each value is written where it is, on one line: what is in it never looks like a key.
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    yaml.add_representer(str, lambda to, text: to.represent_scalar(_STR, text, '"' if "\n" in text else None), dumper)
    jobs = [_job_set(job)] if as_job_set else [_service(job), *(_job(job, kind) for kind in job.kinds)]
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": job.claim},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
    }
    objects = [claim, _network_policy(job), *jobs]
    text = yaml.dump_all(objects, Dumper=dumper, sort_keys=False, width=float("inf"))
    return _HEAD.format(name=job.name, tasks=counts(job.kinds)) + _commented(text)


def _commented(text: str) -> str:
    lines, comments = [], dict(_COMMENTS)
    for line in text.splitlines():
        words = line.lstrip()
        if begin := next(filter(words.startswith, comments), None):
            lines.append(f"{line.removesuffix(words)}# {comments.pop(begin)}")
        lines.append(line)
    return "\n".join(lines)


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "crankshaft", "app.kubernetes.io/instance": job.name}


def _service(job: Job) -> dict[str, Any]:
    """Gives the pods their names, also before they are ready: that they are, depends on each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": _labels(job)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(job),
            "ports": [{"name": "grpc", "port": PORT}, {"name": "watchdog", "port": PORT, "protocol": "UDP"}],
        },
    }


def _network_policy(job: Job) -> dict[str, Any]:
    """Lets the job's pods alone reach each other: TensorFlow's servers ask nobody who they are."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name, "labels": _labels(job)},
        "spec": {
            "podSelector": {"matchLabels": _labels(job)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": _labels(job)}}]}],
        },
    }


def _job(job: Job, kind: str) -> dict[str, Any]:
    names = {task_kind: f"{job.name}-{task_kind}" if job.ps else job.name for task_kind in job.kinds}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": names[kind], "labels": _labels(job)},
        "spec": _job_spec(job, kind, names, {"subdomain": job.name}),
    }


def _job_set(job: Job) -> dict[str, Any]:
    """Describes a JobSet, which makes the Service, and the pods' subdomain, itself."""
    names = {kind: f"{job.name}-{kind}-0" for kind in job.kinds}  # of the Jobs that it makes
    ends = {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]}} if job.ps else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "labels": _labels(job)},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            **ends,
            "replicatedJobs": [
                {"name": kind, "replicas": 1, "template": {"spec": _job_spec(job, kind, names, {})}}
                for kind in job.kinds
            ],
        },
    }


def _job_spec(job: Job, kind: str, names: dict[str, str], network: dict[str, str]) -> dict[str, Any]:
    """Describes the Job for one kind of task.

    Args:
      job: the whole job.
      kind: of the task.
      names: of the Jobs, by kind.
      network: a pod's own network settings.
    """
    count = job.kinds[kind]
    limit = {"backoffLimitPerIndex": _RESTARTS} if job.ps else {"backoffLimit": _RESTARTS * count}
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        **limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", EXIT_USAGE, EXIT_DIVERGED),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                _on_exit("Ignore", EXIT_TERMINATED),
            ]
        },
        "template": {
            "metadata": {"labels": {**_labels(job), "app.kubernetes.io/component": kind}},
            "spec": {**network, **_pod(job, kind, names)},
        },
    }


def _on_exit(action: str, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": "task", "operator": "In", "values": [*codes]}}


def _pod(job: Job, kind: str, names: dict[str, str]) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, kind, names)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }


def _container(job: Job, kind: str, names: dict[str, str]) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(job.gpus_per_worker)} if job.gpus_per_worker and kind == "worker" else {}
    amounts = {"cpu": str(job.cpus), "memory": job.memory, **gpus}
    answers = {"exec": {"command": ["python", "-c", _PROBE]}, "periodSeconds": 30, "timeoutSeconds": 10}
    probes = {"startupProbe": {**answers, "failureThreshold": 20}, "livenessProbe": {**answers, "failureThreshold": 4}}
    return {
        "name": "task",
        "image": job.image,
        "command": [word.replace("$(", "$$(") for word in job.command],  # else Kubernetes puts variables in
        "env": [
            {"name": JOBS, "value": ",".join(f"{names[kind]}:{count}" for kind, count in job.kinds.items())},
            {"name": SERVICE, "value": job.name},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "HOME", "value": "/tmp"},
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": job.name, "key": "secret", "optional": True}}},
        ],
        "ports": [{"containerPort": PORT, "protocol": protocol} for protocol in ("TCP", "UDP")],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        **({} if kind == "evaluator" else probes),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
