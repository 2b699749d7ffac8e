"""The files in examples/ that schedulers take: objects of Kubernetes' schemas, a script that bash reads."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import yaml

from crankshaft.parts.clusters import discovery, kubernetes
from tests.clusters.job_controller import jobs_of

pytestmark = pytest.mark.thorough

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
OBJECTS = ("kubernetes.yaml", "jobset.yaml")


def objects(name: str) -> list[dict]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text("utf-8")))


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_kubernetes_own(name):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[clusters]'").validate
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install '.[clusters]'")
    found = objects(name)
    for each in [each for each in found if each["kind"] != "JobSet"] + jobs_of(found):
        validate(each, "1.33", strict=True)
    for each in [each for each in found if each["kind"] == "JobSet"]:
        # JobSet's own OpenAPI, as Kubeflow publishes it on PyPI (Apache-2.0); a field that it does not know is lost.
        assert models.JobsetV1alpha2JobSet.from_dict(each).to_dict() == each


def test_the_examples_train_job_is_kubeflows_own():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[clusters]'").validate
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install '.[clusters]'")
    runtime, train_job, policy = objects("kubeflow.yaml")
    validate(policy, "1.33", strict=True)
    assert models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
    # Trainer makes a JobSet of the TrainJob's name, in which Jobs have that, their own, and a number.
    variables = {each["name"]: each.get("value", "") for each in train_job["spec"]["trainer"]["env"]}
    host = {"HOSTNAME": "first-node-0-7", "JOB_COMPLETION_INDEX": "7"}
    assert kubernetes.tasks({**variables, **host}).addresses[7] == "first-node-0-7.first:2222"


KINDS = {"kubernetes.yaml": {"worker": 2}, "jobset.yaml": {"worker": 2, "ps": 2}}


@pytest.mark.parametrize(("name", "kinds"), KINDS.items())
def test_each_pod_finds_its_task(name, kinds):
    pods = []
    for job in jobs_of(objects(name)):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        environment = {each["name"]: each.get("value", "") for each in container["env"]}
        for index in range(job["spec"]["completions"]):
            host = {"HOSTNAME": f"{job['metadata']['name']}-{index}", "JOB_COMPLETION_INDEX": str(index)}
            pods.append(kubernetes.tasks({**environment, **host}))
            assert pods[-1].addresses[pods[-1].index] == f"{host['HOSTNAME']}.first:2222"
    assert [pod.index for pod in pods] == list(range(len(pods)))
    assert {len(pod.addresses) for pod in pods} == {len(pods)}
    num_ps = next((int(word.partition("=")[2]) for word in container["command"] if word.startswith("--num_ps=")), 0)
    assert num_ps == kinds.get("ps", 0)
    assert len(pods) == sum(kinds.values()) + bool(num_ps)
    assert discovery.assign_kinds(pods[-1], num_ps, False, {}).kind == [*kinds][-1]


def pods_of(name: str) -> list[tuple[dict, dict, list[dict]]]:
    """Of each Job: its pods' labels, their specification and the variables of their container."""
    found = objects(name)
    if name != "kubeflow.yaml":
        templates = [job["spec"]["template"] for job in jobs_of(found)]
        return [(each["metadata"]["labels"], each["spec"], each["spec"]["containers"][0]["env"]) for each in templates]
    runtime, train_job, _ = found
    # Trainer makes a JobSet of the TrainJob's name, which labels its pods (jobset's constants.go).
    labels = {"jobset.sigs.k8s.io/jobset-name": train_job["metadata"]["name"]}
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return [(labels, job["template"]["spec"]["template"]["spec"], train_job["spec"]["trainer"]["env"])]


@pytest.mark.holds("Kubernetes, by [the files in examples]")
@pytest.mark.parametrize("name", [*OBJECTS, "kubeflow.yaml"])
def test_only_the_jobs_own_pods_may_reach_its_pods_which_have_its_secret_and_few_rights(name):
    (policy,) = (each["spec"] for each in objects(name) if each["kind"] == "NetworkPolicy")
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    for labels, pod, variables in pods_of(name):
        assert labels.items() >= policy["podSelector"]["matchLabels"].items()
        (secret,) = (each["valueFrom"] for each in variables if each["name"] == "CRANKSHAFT_JOB_SECRET")
        assert secret["secretKeyRef"]["name"] == "first"
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 1000}.items()
        assert [each["securityContext"]["allowPrivilegeEscalation"] for each in pod["containers"]] == [False]


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (1, 1), (2, 0), (65, 0), (4, 1), (143, 1), (137, 1)])
def test_slurm_begins_again_unless_a_restart_would_repeat_the_end(tmp_path, code, requeued):
    script(tmp_path, f"exit {code}", f"echo $1 $2 >> {tmp_path}/said")
    for count in ("0", "20"):
        done = run_script(tmp_path, "crankshaft", "train", SLURM_RESTART_COUNT=count)
        assert done.returncode == code
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == "requeue 7\n" * requeued


def test_words_reach_a_task_of_slurm_as_they_were_given(tmp_path):
    words = ["my.py", "--note=a\nb", '--text=it\'s "$HOME" $(id) `id`; #\\', "--run_dir=/runs/a b"]
    script(tmp_path, 'shift 2; printf "%s|" "$@"', "true")
    assert run_script(tmp_path, *words).stdout == "".join(f"{word}|" for word in words)


@pytest.mark.holds("`crankshaft local` and [examples/slurm.sh]")
def test_slurms_script_makes_a_secret_of_each_job(tmp_path):
    script(tmp_path, "echo $CRANKSHAFT_JOB_SECRET", "true")
    first, second = (run_script(tmp_path, "crankshaft", "train").stdout for _ in range(2))
    assert re.fullmatch(r"[0-9a-f]{64}\n", first)
    assert first != second


def test_a_script_without_a_command_is_one_line(tmp_path):
    script(tmp_path, "exit 0", "exit 0")
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert done.stderr == "give the tasks' command, such as crankshaft train --run_dir=...\n"


def script(folder: pathlib.Path, srun: str, scontrol: str) -> None:
    """Writes stand-ins for Slurm's commands into a folder."""
    for name, line in (("srun", srun), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)


def run_script(folder: pathlib.Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **environment}
    command = ["bash", str(EXAMPLES / "slurm.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
