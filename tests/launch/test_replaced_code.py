"""The package's files are replaced under a run, which goes on with those that it began with; or are not there."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from crankshaft.engine import version
from docs.layout import FOLDERS, ROOT, imports, source_files
from tests import runs
from tests.launch.conftest import MLP
from tests.waiting import PATIENCE, wait_until

SCRIPT = """
import inspect, os, pathlib, signal, sys
import numpy as np, tensorflow as tf
from crankshaft import Trainer, main, mean
from crankshaft.engine.hooks import every_steps

here, code = pathlib.Path(__file__).parent, pathlib.Path(sys.modules["crankshaft"].__path__[0])
points = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")

class Plane(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1])[:, 0])

def replace(status, metrics):
    if code.is_symlink():
        (here / "imported").write_text(" ".join(name for name in sys.modules if name.startswith("crankshaft.")))
        code.rename(here / "old")
        (code / "engine/metrics").mkdir(parents=True)
        for path in ("__init__.py", "__main__.py", "engine/added.py", "engine/metrics/means.py"):
            (code / path).write_text("raise ImportError('the new code')")
        assert inspect.getsource(mean).startswith("def mean("), "AutoGraph would read another function"
    elif "--max_restarts=1" in sys.argv and not (here / "killed").exists() and status.step > 6:
        (here / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(Plane, data=((points, points[:, :1]), (points, points[:, :1])), hooks=[every_steps(1, replace)])
"""
MODULES = {".".join(("crankshaft", *path.with_suffix("").parts)): path for path in source_files(ROOT)}


def environment(path: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(path), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_replaced(folder: pathlib.Path, *flags: str) -> str:
    """Runs the script, whose code is replaced after its first step, to its end; returns its output."""
    (folder / "lib").mkdir()
    (folder / "lib" / "crankshaft").symlink_to(ROOT)
    (folder / "script.py").write_text(SCRIPT)
    words = "--train_steps=16 --global_batch_size=16 --jit=off --restore_best --checkpoint_every_steps=3 --run_dir=run"
    done = subprocess.run(
        [sys.executable, "script.py", *words.split(), "--export_dir=export", *flags],
        cwd=folder,
        env=environment(folder / "lib"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "could not transform" not in done.stderr  # AutoGraph's
    assert runs.steps(folder / "run")[-1] == 16
    assert runs.result(folder / "run")["eval"]["loss"] > 0
    assert (folder / "export" / "16").is_dir()
    return done.stdout + done.stderr


def late_imports(name: str) -> set[str]:
    """The package's modules that one of them imports within functions."""
    path = MODULES[name]
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    found = {imported for function in functions for _, imported, _ in imports(function, path)}
    return {imported if imported in MODULES else imported.rpartition(".")[0] for imported in found} & MODULES.keys()


def test_a_run_whose_code_is_replaced_trains_saves_evaluates_and_exports(tmp_path):
    run_replaced(tmp_path)
    loaded = {*(tmp_path / "imported").read_text().split()}
    left = {(name, late) for name in loaded & MODULES.keys() for late in late_imports(name) - loaded}
    # `launch` imports a part as the run begins, if the run has it.
    parts = {(name, late) for name, late in left if name.startswith("crankshaft.launch.") and ".parts." in late}
    composition = "crankshaft.launch.composition"
    assert left - parts == {(f"{composition}.building", f"{composition}.compiled_cache")}, "see `import_for_run`"


def test_a_part_imports_late_only_what_is_imported_with_it():
    for name in MODULES:
        top, _, part = name.removeprefix("crankshaft.").partition(".")
        if top == "parts" and not part.startswith(("dashboard.", "launchers.", "plan.")):
            allowed = ("crankshaft.engine.", "crankshaft.runner.", f"crankshaft.parts.{part.partition('.')[0]}.")
            assert [late for late in late_imports(name) if not late.startswith(allowed)] == [], name


@pytest.mark.thorough
def test_a_task_whose_code_is_replaced_starts_again_with_that_which_it_began_with(tmp_path):
    output = run_replaced(tmp_path, "--max_restarts=1")
    assert (tmp_path / "killed").exists()
    line = f"what runs goes on with build {version.build()}, with which it began"
    assert output.count(line) == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (restart,) = [event for event in events if event["event"] == "restart"]
    assert restart["cause"].startswith("the run was killed by SIGKILL; the code is build ")
    assert restart["cause"].endswith(line)
    described = {event["versions"]["crankshaft"] for event in events if event["event"] == "config"}
    assert described == {version.described()}


@pytest.mark.thorough
def test_workers_start_again_with_the_code_that_their_job_began_with(tmp_path):
    (tmp_path / "crankshaft").symlink_to(ROOT)
    flags = "--model=mlp --model_arg=hidden_units=8 --input=digits --jit=off --train_steps=100000000 --run_dir=run"
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=2", "--", *flags.split(), "--progress=plain"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=file, stderr=file)

    def says(words: str) -> bool:
        return words in log.read_text()

    try:
        wait_until(lambda: says("[worker 0] step "), job, shows=log.read_text)
        (tmp_path / "crankshaft").rename(tmp_path / "old")
        (tmp_path / "crankshaft").mkdir()
        (tmp_path / "crankshaft" / "__init__.py").write_text("raise ImportError('the new code')")
        killed = re.findall(r"^\[local\] worker 1 is process (\d+)", log.read_text(), re.MULTILINE)[0]
        os.kill(int(killed), signal.SIGKILL)
        wait_until(lambda: says("[worker 0] resumed at step "), job, shows=log.read_text)
        wait_until(lambda: log.read_text().rpartition("resumed at step ")[2].count("[worker 0] step "), job)
        job.terminate()
        assert job.wait(PATIENCE) == 143, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert says(f"[local] the code is build unknown by now: what runs goes on with build {version.build()}, with")
    assert not says("ImportError")


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["folder", "archive"])
def test_a_program_without_source_files_trains(where, tmp_path):
    """Compiled, in a folder, or in an archive, as a wheel or a zipapp is."""
    code = tmp_path / "code"
    for name in (*FOLDERS, "__init__.py", "__main__.py"):
        copy = shutil.copytree if name in FOLDERS else shutil.copy
        (code / "crankshaft").mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, code / "crankshaft" / name)
    subprocess.run([sys.executable, "-m", "compileall", "-b", "-q", "code"], cwd=tmp_path, check=True)
    for path in [*code.rglob("*.py")]:
        path.unlink()
    if where == "archive":
        code = pathlib.Path(shutil.make_archive(str(tmp_path / "crankshaft"), "zip", code))
    flags = "--model=mlp --model_arg=hidden_units=8 --input=digits --jit=off --train_steps=4 --run_dir=run"
    done = subprocess.run(
        [sys.executable, "-m", "crankshaft", "train", *flags.split(), "--export_dir=export"],
        cwd=tmp_path,
        env=environment(code),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "could not transform" not in done.stderr  # AutoGraph's
    assert runs.manifests(tmp_path / "run")[-1]["versions"]["crankshaft"] == f"{version.__version__} (build unknown)"


def test_a_run_that_goes_on_under_another_build_says_so(inside, monkeypatch, tmp_path):
    flags = (*MLP, f"--run_dir={tmp_path}")
    written = f"{version.__version__} (build 0123456789ab)"
    with monkeypatch.context() as patch:
        patch.setattr(version, "described", lambda: written)
        inside(*flags, "--train_steps=2").ok()
        patch.setattr(version, "described", lambda: f"{written[:-1]}, commit 01234567)")  # of other files than the code
        assert "was written by" not in inside(*flags, "--train_steps=3").ok().out
    now = f"{version.__version__} (build {version.build()})"
    line = f"ckpt-3 was written by crankshaft {written}, and this is {now}\n"
    assert line in inside(*flags, "--train_steps=4").ok().out
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    configs = [event["versions"]["crankshaft"] for event in events if event["event"] == "config"]
    assert (configs[0], configs[-1]) == (written, version.described())
