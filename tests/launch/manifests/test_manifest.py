"""What `crankshaft manifest` prints: objects that Kubernetes takes, scripts that bash reads, and one line a mistake."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from crankshaft.launch import manifest
from crankshaft.launch.cluster import discovery, kubernetes
from tests.launch.plan.test_saved import PLAN

ROOT = pathlib.Path(__file__).resolve().parents[3]
RUN = ("--model=mlp", "--input=digits", "--run_dir=/runs/first")
HOSTILE = (
    "--note=a\nbackoffLimit: 3",
    '--model_arg=text=it\'s "$HOME" $(id) `id`; #\\',
    "--run_dir=/runs/a b",
    "--prompt=ü: {[*&!|>%@",
)
SHAPES = [
    (f"--workers={workers}", *servers, f"--gpus_per_worker={gpus}")
    for workers, servers, gpus in itertools.product((1, 2, 64), ((), ("--ps=1",), ("--ps=8", "--evaluator")), (0, 1))
]


def printed(capsys, target: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        manifest.main(["crankshaft manifest", target, *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


def objects(capsys, target: str, *arguments: str) -> list[dict]:
    return list(yaml.safe_load_all(printed(capsys, target, "--image=registry/me:1", *arguments)))


def jobs_of(found: list[dict]) -> list[dict]:
    """The Jobs, with those that a JobSet would make, as Jobs."""
    jobs = [each for each in found if each["kind"] == "Job"]
    for job_set in (each for each in found if each["kind"] == "JobSet"):
        for replicated in job_set["spec"]["replicatedJobs"]:
            assert replicated["replicas"] == 1
            name = f"{job_set['metadata']['name']}-{replicated['name']}-0"
            jobs.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]})
    return jobs


@pytest.mark.parametrize("target", ["kubernetes", "jobset"])
@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_objects_are_kubernetes_own(capsys, target, shape):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install crankshaft[clusters]").validate
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install crankshaft[clusters]")
    found = objects(capsys, target, *shape, "--", *RUN)
    for each in [each for each in found if each["kind"] != "JobSet"] + jobs_of(found):
        validate(each, "1.33", strict=True)
    for each in [each for each in found if each["kind"] == "JobSet"]:
        # JobSet's own OpenAPI, as Kubeflow publishes it on PyPI (Apache-2.0); a field that it does not know is lost.
        assert models.JobsetV1alpha2JobSet.from_dict(each).to_dict() == each


def test_the_examples_train_job_is_kubeflows_own():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install crankshaft[clusters]")
    runtime, train_job = yaml.safe_load_all((ROOT / "examples" / "kubeflow.yaml").read_text("utf-8"))
    assert models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
    # Trainer makes a JobSet of the TrainJob's name, in which Jobs have that, their own, and a number.
    variables = {each["name"]: each["value"] for each in train_job["spec"]["trainer"]["env"]}
    host = {"HOSTNAME": "first-node-0-7", "JOB_COMPLETION_INDEX": "7"}
    assert kubernetes.tasks({**variables, **host}).addresses[7] == "first-node-0-7.first:2222"


@pytest.mark.parametrize("target", ["kubernetes", "jobset"])
@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_each_pod_finds_its_task(capsys, target, shape):
    found = objects(capsys, target, *shape, "--", *RUN)
    (service,) = (
        each["metadata"]["name"] if each["kind"] == "Service" else each["spec"]["network"]["subdomain"]
        for each in found
        if each["kind"] in ("Service", "JobSet")
    )
    pods = []
    for job in jobs_of(found):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        environment = {each["name"]: each.get("value", "") for each in container["env"]}
        for index in range(job["spec"]["completions"]):
            host = {"HOSTNAME": f"{job['metadata']['name']}-{index}", "JOB_COMPLETION_INDEX": str(index)}
            pods.append(kubernetes.tasks({**environment, **host}))
            assert pods[-1].addresses[pods[-1].index] == f"{host['HOSTNAME']}.{service}:2222"
    assert [pod.index for pod in pods] == list(range(len(pods)))
    assert len({pod.addresses for pod in pods}) == 1
    assert len(pods[0].addresses) == len(pods)
    if "--num_ps" in str(container["command"]):
        (ps,) = (int(word.partition("=")[2]) for word in container["command"] if word.startswith("--num_ps="))
        last = discovery.assign_kinds(pods[-1], ps, "--evaluator" in container["command"], {})
        assert last.kind == ("evaluator" if "--evaluator" in container["command"] else "ps")


@pytest.mark.parametrize("target", ["kubernetes", "jobset"])
def test_words_reach_a_pod_as_they_were_given(capsys, target):
    job = jobs_of(objects(capsys, target, "--", "my.py", *HOSTILE))[0]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    # https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container: $$(x) stays $(x).
    assert [word.replace("$$(", "$(") for word in command] == ["python", "my.py", *HOSTILE]
    assert "$$(id)" in command[3]


@pytest.mark.parametrize("target", ["kubernetes", "jobset"])
def test_what_is_printed_explains_itself_once_and_has_no_aliases(capsys, target):
    text = printed(capsys, target, "--image=me:1", "--ps=2", "--evaluator", "--", *RUN)
    comments = re.findall(r"^ +# .*", text, re.MULTILINE)
    assert len(comments) == len(set(comments)) >= 9
    assert not re.search(r"[&*]id\d", text)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_scripts_are_bash(capsys, shape):
    text = printed(capsys, "slurm", *shape, "--", *RUN)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    tasks = int(next(line for line in text.splitlines() if "--ntasks=" in line).partition("--ntasks=")[2])
    counts = dict(word.lstrip("-").split("=") for word in shape if "=" in word)
    servers = int(counts.get("ps", 0))
    assert tasks == int(counts["workers"]) + servers + bool(servers) + ("--evaluator" in shape)


@pytest.mark.parametrize(
    "words", [("train.py",), ("-m", "package.train"), (), ("train",), ("crankshaft", "train")], ids=" ".join
)
def test_a_task_is_started_as_python_starts_it(capsys, words):
    start = ["python", *words] if words and words[-1] != "train" else ["crankshaft", "train"]
    (job,) = jobs_of(objects(capsys, "kubernetes", "--", *words, *RUN))
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == [*start, *RUN]
    assert f"\n  {' '.join(start)} \\\n  --model=mlp \\\n" in printed(capsys, "slurm", "--", *words, *RUN)


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (1, 1), (2, 0), (65, 0), (4, 1), (143, 1), (137, 1)])
def test_slurm_begins_again_unless_a_restart_would_repeat_the_end(capsys, tmp_path, code, requeued):
    text = printed(capsys, "slurm", "--", *RUN)
    for name, line in (("srun", f"exit {code}"), ("scontrol", f"echo $1 $2 >> {tmp_path}/said")):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    where = ["env", f"PATH={tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID=7"]
    for count in ("0", "20"):
        done = subprocess.run([*where, f"SLURM_RESTART_COUNT={count}", "bash", "-c", text], check=False)
        assert done.returncode == code
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == "requeue 7\n" * requeued


def test_a_file_called_train_is_no_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").touch()
    with pytest.raises(SystemExit) as ended:
        manifest.main(["crankshaft manifest", "slurm", "--", "train", *RUN])
    assert ended.value.code == 2
    assert "'train' is neither a flag of crankshaft train nor a script" in capsys.readouterr().err


def test_files_that_the_tasks_read_need_not_be_here(capsys):
    words = ("--run_dir=/r", "--config=/nowhere/a.yaml", "--flagfile=/nowhere/b", "--data_dir=/nowhere")
    assert "--flagfile=/nowhere/b" in printed(capsys, "slurm", "--time=1-23:59:59", "--memory=1.5Gi", "--", *words)


def test_requests_are_a_plans_but_for_what_is_set(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    text = printed(capsys, "slurm", f"--plan={plan}", "--workers=64", "--cpus=1", "--", *RUN)
    assert "#SBATCH --ntasks=67\n" in text  # 64 workers, 2 servers, a coordinator
    assert "#SBATCH --gpus-per-task=8\n" in text
    assert "#SBATCH --mem-per-cpu=4096M\n" in text  # 3 GiB, and a third
    assert "#SBATCH --ntasks=4\n" in printed(capsys, "slurm", f"--plan={plan}", "--workers=4", "--ps=0", "--", *RUN)
    for workers, says in ((), "is for several numbers of hosts"), (("--workers=5",), "is not for --workers=5"):
        with pytest.raises(SystemExit):
            manifest.main(["crankshaft manifest", "slurm", f"--plan={plan}", *workers, "--", *RUN])
        assert f"{plan} {says}; use --workers=4 or 64\n" in capsys.readouterr().err


def test_words_reach_a_task_of_slurm_as_they_were_given(capsys, tmp_path):
    text = printed(capsys, "slurm", "--memory=3Gi", "--cpus=2", "--", "my.py", *HOSTILE)
    assert "#SBATCH --mem-per-cpu=1536M" in text
    program = f"{shlex.quote(sys.executable)} -c 'import sys; print(sys.argv[1:])'"
    (tmp_path / "srun").write_text(f'#!/usr/bin/env bash\nshift 2; exec {program} "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    command = ["env", f"PATH={tmp_path}:/usr/bin:/bin", "bash", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(["python", "my.py", *HOSTILE])


def test_what_restarts_and_what_does_not(capsys):
    (job,) = jobs_of(objects(capsys, "kubernetes", "--workers=3", "--", *RUN))
    assert job["spec"]["backoffLimit"] == 18
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 65]),
        ("Ignore", None),
        ("Ignore", [143]),
    ]
    servers = jobs_of(objects(capsys, "kubernetes", "--workers=3", "--ps=1", "--", *RUN))
    assert [job["spec"]["backoffLimitPerIndex"] for job in servers] == [6, 6, 6]


MISTAKES = {
    "": "crankshaft manifest has no target; use slurm, kubernetes, jobset or dockerfile",
    "yarn": "yarn is not a target of crankshaft manifest; use slurm, kubernetes, jobset or dockerfile",
    "slurm": "the command of the tasks is missing",
    "slurm -- --model=mlp": "has no run_dir=FOLDER",
    "slurm -- --run_dir=runs/a": "run_dir=runs/a is not an absolute path",
    "kubernetes -- RUN": "--image is missing",
    "jobset --image=a -- --run_dir=/data/a": "/data/a is not in /runs",
    "slurm --evaluator -- RUN": "--evaluator is for --ps=N",
    "slurm --name=a\nb -- RUN": "small letters, digits and hyphens",
    "slurm --time=soon -- RUN": "e.g. 12:00:00",
    "slurm --image=a -- RUN": "--image has no use with crankshaft manifest slurm; leave",
    "slurm --claim=a -- RUN": "--claim has no use with",
    "jobset --image=a --time=12:00:00 -- RUN": "--time has no use with",
    "dockerfile --workers=3": "--workers has no use with",
    "dockerfile -- RUN": "'--model=mlp' has no use with",
    "slurm --time=1:61:00 -- RUN": "--time=1:61:00 can't be used: it is not a time",
    "slurm --time=1-25:00:00 -- RUN": "it is not a time",
    "slurm --time=0:00:00 -- RUN": "it is less than the 5 minutes that tasks need",
    "slurm --time=0:02:00 -- RUN": "it is less than the 5 minutes that tasks need",
    "slurm --memory=0Gi -- RUN": "--memory=0Gi can't be used: it is not a quantity from 64Mi to",
    "slurm --memory=8000m -- RUN": "it is not a quantity from 64Mi to 16Ti, e.g. 8Gi",
    "slurm --memory=8 -- RUN": "it is not a quantity",
    "slurm --memory=99999Ti -- RUN": "it is not a quantity",
    "jobset --image=a\tb -- RUN": "--image=a\\tb can't be used: it is not an image",
    "slurm -- RUN --train_epochs=-1": "train_epochs=-1 can't be used: it takes a number",
    "slurm -- a.py --own=1 --run_dir=/r --seed=x": "seed=x can't be used",
    "slurm -- RUN --train_epoch=3": "train_epoch is unknown; did you mean train_epochs",
    "slurm -- RUN train": "'train' is not a flag of crankshaft train",
    "slurm --seed=1 -- RUN": "seed is a flag of the tasks",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake_is_one_line(capsys, line):
    arguments = [each for word in line.split(" ") if word for each in (RUN if word == "RUN" else [word])]
    with pytest.raises(SystemExit) as ended:
        manifest.main(["crankshaft manifest", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert MISTAKES[line] in err
