"""The entry points of docs/services.md, with a service's folders and variables made in a temporary root."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from crankshaft.parts.launchers.resources import free_ports
from tests.pages import ROOT, blocks
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough

PAGE = ROOT / "docs" / "services.md"
ENTRIES = {block.title: block.text for block in blocks(PAGE) if block.title}
(LOSS,) = (block.text.strip() for block in blocks(PAGE) if block.language == "text")


class Service:
    """A container: the page's entry point, whose absolute paths are below a root, and a service's variables."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        path = os.pathsep.join([str(root / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path}
        (root / "bin").mkdir()

    def program(self, name: str, text: str) -> None:
        (self.root / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.root / "bin" / name).chmod(0o755)

    def start(self, entry: str, *arguments: str, **variables: str) -> subprocess.Popen:
        text = re.sub(r"/(?=opt/ml|runs/|shared/)", f"{self.root}/", ENTRIES[entry])
        (self.root / entry).write_text(text)
        environment = {**self.environment, **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(["bash", entry, *arguments], cwd=self.root, env=environment, text=True, **pipes)

    def run(self, entry: str, *arguments: str, code: int = 0, **variables: str) -> str:
        with self.start(entry, *arguments, **variables) as process:
            try:
                output = process.communicate(timeout=PATIENCE)[0]
            finally:
                process.kill()
        assert process.returncode == code, output
        return output

    def steps(self, folder: str) -> list[str]:
        return sorted(path.parent.name for path in (self.root / folder).glob("*/saved_model.pb"))


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path)


def test_each_entry_point_is_short():
    assert len(ENTRIES) == 6
    assert all(len(text.splitlines()) <= 20 for text in ENTRIES.values())


def test_sagemaker_has_the_model_the_metrics_and_the_failure(service):
    ml = service.root / "opt" / "ml"
    for folder in ("input/config", "input/data/training", "model", "output"):
        (ml / folder).mkdir(parents=True)
    random = np.random.default_rng(0).normal(size=(80, 2))
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in random]
    (ml / "input/data/training/a.csv").write_text("\n".join(["a,b,label", *rows]))
    parameters = ml / "input/config/hyperparameters.json"
    parameters.write_text(json.dumps({"train_epochs": "4", "learning_rate": "0.1", "global_batch_size": "16"}))
    output = service.run("sagemaker.sh", "train")
    assert service.steps("opt/ml/model") == ["16"]
    evaluations = [json.loads(line) for line in output.splitlines() if line.startswith('{"event":"evaluation"')]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 16]
    assert [float(loss) for loss in re.findall(LOSS, output)] == [line["metrics"]["loss"] for line in evaluations]
    for text in ("step 8/16  evaluation  loss 2.402e-05  auc 1.0000", "evaluation at step 8: auc 1, loss 2.402e-05"):
        assert re.findall(LOSS, text) == ["2.402e-05"]
    parameters.write_text(json.dumps({"train_epochs": "4", "learning_rte": "0.1"}))
    service.run("sagemaker.sh", "train", code=2)
    assert "learning_rte is unknown" in json.loads((ml / "output" / "failure").read_text())["error"]


def test_vertex_writes_to_three_folders_of_a_bucket(service):
    bucket = f"file://{service.root}/bucket"
    variables = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    service.run("vertex.sh", **{f"AIP_{name}": f"{bucket}/{folder}/" for name, folder in variables.items()})
    assert service.steps("bucket/model") == ["69"]
    assert {path.name for path in (service.root / "bucket" / "logs").iterdir()} > {"train", "eval"}
    held = {path.name for path in (service.root / "bucket" / "checkpoints").iterdir()}
    assert held > {"checkpoints", "events.jsonl", "result.json"}
    assert held.isdisjoint({"tensorboard", "export"})


def test_azure_has_its_folders_beside_the_mounted_output(service):
    service.run("azureml.sh", str(service.root / "mounted"))
    assert service.steps("outputs/model") == ["69"]
    assert json.loads((service.root / "outputs" / "result.json").read_text())["step"] == 69
    assert list((service.root / "logs" / "tensorboard" / "train").iterdir())
    assert (service.root / "mounted" / "run" / "checkpoints" / "ckpt-69.manifest.json").exists()


def test_kubeflows_variable_is_read(service):
    cluster = {"worker": [f"127.0.0.1:{free_ports(1)[0]}"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 0}, "environment": "cloud"}
    service.run("kubeflow.sh", TF_CONFIG=json.dumps(task))
    assert (service.root / "runs" / "first" / "checkpoints" / "ckpt-69.manifest.json").exists()


def test_slurm_requeues_a_job_that_was_stopped_alone(service):
    service.program("scontrol", f'echo "$@" >> {service.root}/requeued')
    service.program("srun", 'exec "$@"')
    service.run("requeued.sh", SLURM_JOB_ID="7")
    assert not (service.root / "requeued").exists()
    service.program("srun", "exit 143")
    service.run("requeued.sh", code=143, SLURM_JOB_ID="7")
    assert (service.root / "requeued").read_text() == "requeue 7\n"


def test_docker_stops_a_run_that_then_resumes(service):
    checkpoints = service.root / "runs" / "first" / "checkpoints"
    events = service.root / "runs" / "first" / "events.jsonl"
    flags = ("--model=mlp", "--train_steps=1000000", "--jit=off", "--progress=off")
    with service.start("docker.sh", *flags) as process:
        try:
            wait_until(lambda: events.exists() and '"window"' in events.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=PATIENCE) == 143
        finally:
            process.kill()
    step = max(int(path.name.split(".")[0][5:]) for path in checkpoints.glob("*.manifest.json"))
    output = service.run("docker.sh", "--model=mlp", "--jit=off", f"--stop_at_step={step + 5}", "--train_steps=1000000")
    assert f"resumed at step {step:,}" in output
