"""Writes Kubernetes' objects for a cluster: Indexed Jobs with a headless Service, or a JobSet.

https://kubernetes.io/docs/concepts/workloads/controllers/job, https://jobset.sigs.k8s.io.
"""

from __future__ import annotations

from typing import Any

from ..cluster.cluster import SECRET
from ..cluster.kubernetes import JOBS, PORT, SERVICE
from ..errors import EXIT_TERMINATED, EXIT_USAGE, UsageError
from .job import Job

_RESTARTS = 6  # of each task
_GRACE_SECONDS = 120  # for a checkpoint
_USER = 1000
_HEAD = """\
# {what}: {tasks}.
# The last object asks for a volume that all pods can write to (ReadWriteMany); leave it out where {claim} is one.
# For signed messages: kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)
"""
_DOCKERFILE = f"""\
FROM python:3.11-slim
RUN useradd --uid {_USER} --create-home user
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src
USER user
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

    jobs = [_job_set(job)] if as_job_set else [_service(job), *(_job(job, kind) for kind in job.kinds)]
    tasks = ", ".join(f"{count} {kind}" for kind, count in job.kinds.items())
    head = _HEAD.format(what=job.name, tasks=tasks, claim=job.claim, name=job.name)
    objects = [_network_policy(job), *jobs, _claim(job)]
    return head + "---\n" + yaml.safe_dump_all(objects, sort_keys=False, width=110)


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name}


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


def _claim(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": job.claim},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
    }


def _job(job: Job, kind: str) -> dict[str, Any]:
    names = {each: f"{job.name}-{each}" if job.ps else job.name for each in job.kinds}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": names[kind], "labels": _labels(job)},
        "spec": _job_spec(job, kind, names, {"subdomain": job.name}),
    }


def _job_set(job: Job) -> dict[str, Any]:
    """Returns a JobSet, which makes the Service, and the pods' subdomain, itself."""
    names = {kind: f"{job.name}-{kind}-0" for kind in job.kinds}  # of the Jobs that it makes
    ends = {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]}} if job.ps else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "labels": _labels(job)},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},  # the Jobs restart their pods, as they are told below
            **ends,
            "replicatedJobs": [
                {"name": kind, "replicas": 1, "template": {"spec": _job_spec(job, kind, names, {})}}
                for kind in job.kinds
            ],
        },
    }


def _job_spec(job: Job, kind: str, names: dict[str, str], network: dict[str, str]) -> dict[str, Any]:
    """Returns what a Job of one kind of task does.

    In step, a task that fails ends all others, which fail too: each counts. Around servers each is started again by
    itself. A new pod comes only once the old one is gone: TensorFlow takes no two of one index.

    Args:
      job: the whole of it.
      kind: of the task.
      names: of the Jobs, by kind.
      network: what a pod says of its own.
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
                {  # a mistake, which a restart would repeat
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "task", "operator": "In", "values": [EXIT_USAGE]},
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {  # it has saved, and ended as it was asked to
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "task", "operator": "In", "values": [EXIT_TERMINATED]},
                },
            ]
        },
        "template": {"metadata": {"labels": _labels(job)}, "spec": {**network, **_pod(job, kind, names)}},
    }


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
    answers = {"tcpSocket": {"port": PORT}, "periodSeconds": 10}
    # TensorFlow's server answers for as long as its process lives; a task that is stuck names itself, and ends.
    probes = {"startupProbe": {**answers, "failureThreshold": 60}, "livenessProbe": {**answers, "failureThreshold": 6}}
    return {
        "name": "task",
        "image": job.image,
        "command": [word.replace("$(", "$$(") for word in job.command],  # else Kubernetes puts variables in
        "env": [
            {"name": JOBS, "value": ",".join(f"{names[each]}:{count}" for each, count in job.kinds.items())},
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
