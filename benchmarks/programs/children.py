"""Runs scripts of programs in processes that are forked from one that has imported TensorFlow, before it has devices.

`python -m benchmarks.programs.children` is that process: it reads a job per line, forks, and answers each with a line.
So each program begins as a new process would, a crash or a hang ends one, and nothing stays of it. Programs of Keras
alone are forked from it, others from a process that it forks first, which imports crankshaft.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


class Outcome(NamedTuple):
    """What a side has come to: its values by name, or the last line by which it was refused or failed.

    Its kind is "values", "refused" (a `UsageError`), "failed" (any other exception), "crashed" or "hung".
    """

    kind: str
    line: str
    values: dict[str, np.ndarray]


class Children:
    """The process from which sides are forked, started when it is needed; `folder` is for scripts and values."""

    def __init__(self, folder: Path, timeout_seconds: float):
        self._folder, self._timeout_seconds = folder, timeout_seconds
        self._started: subprocess.Popen | None = None
        self._count = 0

    def run(self, script: str, how: dict[str, Any]) -> Outcome:
        """Runs one side of a program's script."""
        self._count += 1
        path = self._folder / f"program_{self._count}.py"
        path.write_text(script, encoding="utf-8")
        if "processes" in how:
            done = self._run_cluster(path, how)
        else:
            template = self._template()
            job = {"path": str(path), "how": how, "timeout_seconds": self._timeout_seconds}
            print(json.dumps(job), file=template.stdin, flush=True)
            if not (answer := template.stdout.readline()):
                raise RuntimeError("a process from which programs are forked has ended")
            done = json.loads(answer)
        values = {}
        if done["kind"] == "values":
            with np.load(path.with_suffix(".npz")) as file:
                values = dict(file)
        for each in (path, path.with_suffix(".npz"), path.with_suffix(".json")):
            each.unlink(missing_ok=True)
        return Outcome(done["kind"], done["line"], values)

    def _template(self) -> subprocess.Popen:
        if self._started is None:
            command = [sys.executable, "-m", "benchmarks.programs.children"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            # What programs leave in temporary files goes with the folder.
            variables = {"TMPDIR": str(self._folder), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
            self._started = subprocess.Popen(command, cwd=ROOT, text=True, env={**os.environ, **variables}, **pipes)
        return self._started

    def _run_cluster(self, path: Path, how: dict[str, Any]) -> dict:
        """Runs a side as a job of several processes; the chief writes the values."""
        rest = {name: value for name, value in how.items() if name != "processes"}
        main, its = path.with_name("main.py"), {"how": rest, "name": path.stem, "path": str(path), "root": str(ROOT)}
        main.write_text(_CLUSTER_MAIN.format(**its), encoding="utf-8")
        command = [sys.executable, "-m", "crankshaft", "local", *how["processes"], "--", str(main)]
        environment = {**os.environ, "TMPDIR": str(self._folder)}
        job = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._folder
        )
        try:
            output = job.communicate(timeout=self._timeout_seconds + 60)[0]
        except subprocess.TimeoutExpired:
            job.terminate()
            job.communicate()
            return {"kind": "hung", "line": f"after {self._timeout_seconds + 60} s"}
        answer = path.with_suffix(".json")
        if answer.exists():
            return json.loads(answer.read_text("utf-8"))
        return {"kind": "crashed", "line": output.strip().rpartition("\n")[2]}

    def close(self) -> None:
        if self._started is not None:
            self._started.stdin.close()
            self._started.wait()


_CLUSTER_MAIN = """
import json, os, sys
from {name} import values
sys.path.insert(0, {root!r})
from benchmarks.programs.children import write_values
job = json.loads(os.environ["TF_CONFIG"])
is_chief = job["task"] == {{"type": next(iter(job["cluster"])), "index": 0}}
write_values(values, {how!r}, {path!r} if is_chief else __file__)
"""


def write_values(values: Any, how: dict[str, Any], path: str) -> None:
    """Calls a script's `values`, and writes what it returns, or the error's last line, beside the script."""
    answer, target = {"kind": "values", "line": ""}, Path(path)
    try:
        np.savez(target.with_suffix(".new.npz"), **values(**how))
        os.replace(target.with_suffix(".new.npz"), target.with_suffix(".npz"))
    except Exception as error:
        refused = type(error).__name__ in ("UsageError", "RunError")
        place = "" if refused else _place(error)
        line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{place}"
        answer = {"kind": "refused" if type(error).__name__ == "UsageError" else "failed", "line": line}
    target.with_suffix(".json").write_text(json.dumps(answer), encoding="utf-8")


def _place(error: Exception) -> str:
    """The innermost place of this project's in a traceback."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(str(ROOT))]
    frames = [each for each in frames if ".venv" not in each.filename and "benchmarks" not in each.filename]
    return f" ({Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno})" if frames else ""


def _serve() -> None:
    """Forks a process for each job that a line describes, and answers how it ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is not an answer
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    reading, writing = os.pipe()
    if with_crankshaft := os.fork():
        jobs, passed_on = sys.stdin, os.fdopen(writing, "w")
        os.close(reading)
    else:
        jobs = os.fdopen(reading)
        os.close(writing)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(os.kill, os.getppid(), signal.SIGKILL)  # which would wait for answers
            modes = "runner.modes.predicting", "runner.modes.saved_run"
            for name in ("launch.fit", "launch.composition.open_run", *modes):
                importlib.import_module(f"crankshaft.{name}")
            if_it_fails.pop_all()
    gc.disable()  # a fork's memory is given back as a whole
    for line in jobs:
        job = json.loads(line)
        if with_crankshaft and not job["how"].get("oracle"):
            print(line, end="", file=passed_on, flush=True)
            continue
        if not (child := os.fork()):
            os.setpgrp()
            _run_job(job)
        print(json.dumps(_wait(child, job)), file=answers, flush=True)
    if with_crankshaft:
        passed_on.close()
        os.waitpid(with_crankshaft, 0)


def _run_job(job: dict) -> None:
    path = Path(job["path"])
    sys.argv = [str(path), json.dumps(job["how"])]
    sys.stdin.close()
    scope = {"__name__": "program", "__file__": str(path)}
    # AutoGraph reads functions' source by the file's name.
    exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
    write_values(scope["values"], job["how"], str(path))
    os._exit(0)


def _wait(child: int, job: dict) -> dict:
    until = time.monotonic() + job["timeout_seconds"]
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            answer = Path(job["path"]).with_suffix(".json")
            return json.loads(answer.read_text("utf-8")) if answer.exists() else {"kind": "crashed", "line": ""}
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"kind": "hung", "line": f"after {job['timeout_seconds']} s"}


if __name__ == "__main__":
    _serve()
