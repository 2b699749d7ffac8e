"""Runs Keras's own tests with `crankshaft.fit` instead of `keras.Model.fit`, and counts those that pass unchanged.

    python -m benchmarks.keras_suite --out=after.json
    python -m benchmarks.keras_suite --tests=after.json --out=later.json
    python -m benchmarks.keras_suite --compare before.json after.json
    python -m benchmarks.keras_suite --report later.json

A test counts if it calls `fit` and does not fail with Keras's own. The first command finds these, among those of files
that call `fit` or Keras's `run_layer_test`, which does; the second runs those of a result. `--files=REGEX` and
`--only=REGEX` take some of the files, or of the tests by FILE::CLASS::TEST. Tests are those of the installed Keras,
whose wheel has them, or of `--keras=FOLDER`, a checkout or an unpacked sdist. Some need jax, grain or scipy: files that
can't be imported without are named.

Each file runs in a process of its own, forked from one that has imported TensorFlow and has not started it yet.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from .markdown import table

KINDS = {
    "passed": "passed unchanged",
    "wrong": "wrong result",
    "error": "failed within fit",
    "refused": "refused",
    "timeout": "took too long, or ended the process",
    "internals": "tests Keras's internals, or a documented difference",
}
_CALLS_FIT = re.compile(r"\bfit\(|\brun_layer_test\(")
_FORKS = threading.Lock()  # two threads that fork at once would inherit each other's pipes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keras", help="folder that has Keras's sources and tests; default: the installed package's")
    parser.add_argument("--tests", metavar="JSON", help="run the tests of this result; default: all that call fit")
    parser.add_argument("--files", default="", help="regular expression: run the files in whose path it is")
    parser.add_argument("--only", default="", help="regular expression: run the tests in whose FILE::CLASS::TEST it is")
    parser.add_argument("--out", help="where to write the result, as JSON")
    parser.add_argument("--processes", type=int, default=2, help="files at a time")
    parser.add_argument("--timeout_seconds", type=float, default=900.0, help="per file and per `fit`, for hangs")
    parser.add_argument("--compare", nargs=2, metavar="JSON", help="print the tests whose outcome differs")
    parser.add_argument("--report", metavar="JSON", help="print the tables of a result")
    options = parser.parse_args(arguments)
    if options.report:
        print(report(json.loads(Path(options.report).read_text())))
        return 0
    if options.compare:
        return compare(*(json.loads(Path(path).read_text()) for path in options.compare))
    print(report(run(options)))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the selected tests; returns each one's kind and message by its name."""
    root = _prepared(options.keras)
    known = json.loads(Path(options.tests).read_text())["tests"] if options.tests else None
    chosen = None if known is None else {name for name in known if re.search(options.only, name)}
    files = _files(root) if chosen is None else {name.split("::")[0] for name in chosen}
    files = sorted(file for file in files if re.search(options.files, file))
    result: dict[str, Any] = {"tests": {}, "without": []}

    def one(file: str) -> None:
        selected = None if chosen is None else {name for name in chosen if name.startswith(f"{file}::")}
        found = _run_file(root, file, selected, "crankshaft", options.timeout_seconds)
        if not found:
            result["without"].append(file)
        if selected is None:
            chosen_here = {name for name in found if re.search(options.only, name)}
            # One that did not end has not said whether it calls `fit`; Keras's own may.
            selected = {name for name in chosen_here if found[name]["calls"] or found[name]["kind"] == "timeout"}
            failed = {name for name in selected if found[name]["kind"] != "passed"}
            of_keras = _run_file(root, file, failed, "keras", options.timeout_seconds) if failed else {}
            right = {name for name, each in of_keras.items() if each["kind"] == "passed" and each["calls"]}
            selected -= failed - right
        tests = {name: found.get(name, {"kind": "timeout", "message": "it did not run"}) for name in selected}
        if selected:
            print(f"{file}: {sum(each['kind'] == 'passed' for each in tests.values())} of {len(selected)}", flush=True)
        result["tests"].update(tests)
        if options.out:
            Path(options.out).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")

    with futures.ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(one, files))
    return result


def _prepared(keras: str | None) -> Path:
    """Imports TensorFlow, and Keras from `keras` if set, without starting them; returns Keras's root folder."""
    if keras:
        sys.path.insert(0, os.path.abspath(keras))
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in ("pytest", "tensorflow", "crankshaft.launch.fit", "crankshaft.launch.composition.open_run"):
        importlib.import_module(name)
    return Path(importlib.import_module("keras").__file__ or "").resolve().parents[1]


def _files(root: Path) -> list[str]:
    """Returns the test files that may call `fit`, relative to `root`."""
    paths = (root / "keras").rglob("*_test.py")
    return [str(path.relative_to(root)) for path in paths if _CALLS_FIT.search(path.read_text())]


def _run_file(root: Path, file: str, tests: set[str] | None, fit: str, timeout_seconds: float) -> dict[str, dict]:
    """Runs a file's tests in forked processes: another one for those that a first could not run to its end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        done: dict[str, dict] = {}
        while True:
            out.write_text("")
            task = functools.partial(_run_pytest, root, file, tests, {*done}, fit, out)
            code = _forked(task, folder, timeout_seconds)
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            before = len(done)
            begun = {line["name"]: {**line, "kind": "timeout", "message": f"ended by {code}"} for line in lines}
            done |= {**begun, **{line["name"]: line for line in lines if "kind" in line}}
            if code == 0 or len(done) == before:
                return {name: {key: each[key] for key in each if key != "name"} for name, each in done.items()}


def _forked(task: Callable[[], int], folder: str, timeout_seconds: float) -> int:
    """Runs `task` in a forked process; returns its status, minus the signal that ended it."""
    with _FORKS:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.chdir(folder)
                with open("log", "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                code = task()
            finally:
                os._exit(code)
    until = time.monotonic() + timeout_seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.05)


def _run_pytest(root: Path, file: str, tests, done: set[str], fit: str, out: Path) -> int:
    import pytest

    from .keras_suite_plugin import FitReplaced

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    plugin = FitReplaced(fit, tests, done, out)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "-c", os.devnull]
    code = pytest.main([*options, f"--rootdir={root}", str(root / file)], plugins=[plugin])
    return 0 if code in (0, 1, 5) else int(code)


def report(result: Mapping[str, Any]) -> str:
    """Returns two tables: how many tests came to which kind, in all and for each file with one that did not pass."""
    by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for name, each in sorted(result["tests"].items()):
        by_file[name.split("::")[0]][each["kind"]] += 1
    total = sum(by_file.values(), collections.Counter())
    kinds = [kind for kind in KINDS if total[kind]]
    failed = {file: counts for file, counts in by_file.items() if counts.keys() != {"passed"}}
    whole = [f"{sum(total.values())} tests that call fit, in {len(by_file)} files", "tests"]
    lines = [table(whole, [[KINDS[kind], str(total[kind])] for kind in kinds]), ""]
    lines += [f"All tests of {len(by_file) - len(failed)} files pass."]
    if failed:
        rows = [
            [file, *(str(n or "") for n in (sum(each.values()), *map(each.get, kinds)))]
            for file, each in failed.items()
        ]
        lines += ["", table(["file", "tests", *kinds], rows)]
    if result["without"]:
        lines += ["", f"Files that can't be imported or have no test: {', '.join(sorted({*result['without']}))}"]
    return "\n".join(lines)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Prints the tests whose kind differs; returns 1 if one passed before and does not now."""
    worse = 0
    for name in sorted({*before["tests"], *after["tests"]}):
        kinds = [each["tests"].get(name, {}).get("kind", "-") for each in (before, after)]
        if kinds[0] != kinds[1]:
            print(f"{name}: {kinds[0]} -> {kinds[1]}  {after['tests'].get(name, {}).get('message', '')}")
            worse += kinds[0] == "passed"
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
