"""Tests the corners of the versions that setup.cfg allows, each in an environment of its own: `make versions`.

The environments are in .versions/, made by the Makefile as .venv is. It needs nothing but Python's own library.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".versions"
PATIENCE_SECONDS = 1800
# What `make train` runs, from the page that shows it.
TRAIN = "train --model=cnn --input=digits --train_epochs=10 --run_dir=runs/first"
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path[:] = [folder for folder in sys.path if folder]
import crankshaft
folders = ("engine", "models", "input", "launch", "parts", "runner")
names = [m.name for m in pkgutil.walk_packages(crankshaft.__path__, "crankshaft.", onerror=lambda name: None)]
names = [name for name in names if name.split(".")[1] in folders]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""
SHOW_VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps([sys.version.split()[0], *map(version, ("tensorflow", "keras", "numpy"))]))
"""


@dataclasses.dataclass(frozen=True)
class Corner:
    """Describes a set of versions.

    Attributes:
      name: the environment's folder in .versions/, and its constraints file beside this script, if it has one.
      python: the minor version of Python.
      is_wheel: whether the package is installed as a wheel instead of from the checkout.
    """

    name: str
    python: str
    is_wheel: bool = False

    @property
    def environment(self) -> pathlib.Path:
        return FOLDER / self.name

    @property
    def log(self) -> pathlib.Path:
        return FOLDER / f"{self.name}.log"

    def interpreter(self) -> str | None:
        """Finds the Python of this version that starts: a command on PATH may be a shim that fails."""
        installed = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{self.python}.*/bin/python")), reverse=True)
        for python in (f"python{self.python}", "python3", *installed):
            with contextlib.suppress(OSError):
                code = "import sys; print('%d.%d' % sys.version_info[:2])"
                done = subprocess.run([python, "-c", code], capture_output=True, text=True)
                if done.stdout.strip() == self.python:
                    return python
        return None


CORNERS = (Corner("oldest", "3.10"), Corner("between", "3.11"), Corner("newest", "3.13", is_wheel=True))


class Checks:
    """Runs the checks of one corner, in a folder outside of the checkout.

    Attributes:
      results: the outcome of each check, by its name.
    """

    def __init__(self, corner: Corner, python: str, folder: pathlib.Path):
        self._corner, self._python, self._folder = corner, python, folder
        self._program = corner.environment / "bin" / "crankshaft"
        self.results: dict[str, str] = {}

    def check(self, name: str, act: Callable[[], None]) -> bool:
        """Runs one check, prints its outcome, and returns whether it passed."""
        start = time.monotonic()
        try:
            act()
            outcome = f"{time.monotonic() - start:.0f} s"
        except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
            outcome = "FAILED"
            print(f"{self._corner.name}: {name}: {error}\nThe end of {self._corner.log}:")
            print("".join(self._corner.log.read_text("utf-8", "replace").splitlines(keepends=True)[-20:]))
        self.results[name] = outcome
        print(f"{self._corner.name}: {name}: {outcome}", flush=True)
        return outcome != "FAILED"

    def install(self) -> None:
        """Makes the environment as `make install` does, again only if the files that say what to install changed."""
        constraints = pathlib.Path(__file__).with_name(f"{self._corner.name}.txt")
        variables = [f"VENV={self._corner.environment}", f"PYTHON={self._python}"]
        variables += [f"CONSTRAINTS={constraints if constraints.exists() else ''}"]
        if self._corner.is_wheel:
            wheels = FOLDER / "wheel"
            for stale in (wheels, ROOT / "build"):  # setuptools also packs modules in build/ that are gone
                shutil.rmtree(stale, ignore_errors=True)
            self._call(self._python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT))
            (wheel,) = wheels.glob("*.whl")
            self._call("make", "install", *variables, f"PACKAGE={wheel}", folder=ROOT)
            pip = (self._corner.environment / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps")
            self._call(*pip, "--force-reinstall", str(wheel))
        else:
            self._call("make", "install", *variables, folder=ROOT)

    def versions(self) -> list[str]:
        assert self._call(self._program, "--version").startswith("crankshaft ")
        return json.loads(self._call_python("-c", SHOW_VERSIONS))

    def import_all(self) -> None:
        self._call_python("-c", IMPORT_ALL)

    def train(self) -> None:
        self._call(self._program, *TRAIN.split())
        assert self._result()["eval"]["accuracy"] > 0.9, "the run's accuracy is 0.9 or less"

    def fit(self) -> None:
        """Runs the page's program with a compiled Keras model."""
        programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
        (program,) = (text for text in programs if "run = fit(" in text)
        self._call_python("-c", program)

    def resume(self) -> None:
        self._call(self._program, *TRAIN.replace("epochs=10", "epochs=12").split())
        assert self._result()["step"] == 276, f"the resumed run ended at step {self._result()['step']}"

    def resume_run_of(self, other: pathlib.Path) -> None:
        """Resumes a run that another corner has saved, beside which it has the same loss as after its own."""
        shutil.copytree(other / "runs" / "saved", self._folder / "runs" / "other")
        words = TRAIN.replace("epochs=10", "epochs=12").replace("runs/first", "runs/other")
        self._call(self._program, *words.split())
        mine, theirs = (self._result(name)["eval"]["loss"] for name in ("first", "other"))
        shutil.rmtree(self._folder / "runs" / "other")
        assert abs(mine - theirs) < 1e-3 * mine, f"its loss is {theirs}, of a run saved here {mine}"

    def monitor(self) -> None:
        """Opens the page of the run that was trained."""
        command = [self._program, "monitor", "runs/first", "--port=0"]
        with open(self._corner.log, "ab") as log:
            server = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            for line in server.stdout:
                if url := re.search(r"http://\S+", line):
                    page = urllib.request.urlopen(url[0], timeout=60).read().decode()
                    assert "<html" in page, f"the page is {page[:80]!r}"
                    return
            raise AssertionError("crankshaft monitor ended without the address of a page")
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()

    def test_fast(self) -> None:
        self._call("make", "test-fast", f"VENV={self._corner.environment}", folder=ROOT)

    def keep_saved_run(self) -> None:
        shutil.copytree(self._folder / "runs" / "first", self._folder / "runs" / "saved")

    def _result(self, name: str = "first") -> dict:
        return json.loads((self._folder / "runs" / name / "result.json").read_text())

    def _call_python(self, *arguments: str) -> str:
        return self._call(self._corner.environment / "bin" / "python", *arguments)

    def _call(self, *command: str | pathlib.Path, folder: pathlib.Path | None = None) -> str:
        """Runs a command, and returns its standard output. The log has all that it printed."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with open(self._corner.log, "a+b") as log:
            begin = log.tell()
            done = subprocess.run(
                command,
                cwd=folder or self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=PATIENCE_SECONDS,
            )
            log.seek(max(begin, log.seek(0, os.SEEK_END)))
            log.write(done.stdout)
        assert done.returncode == 0, f"exit code {done.returncode}: {' '.join(map(str, command))[:200]}"
        return done.stdout.decode()


def main() -> int:
    """Tests the corners that are named, or all, prints a table, and returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corners", nargs="*", metavar="CORNER", help="oldest, between or newest; all if omitted")
    parser.add_argument("--quick", action="store_true", help="import every module, train and fit; no more")
    arguments = parser.parse_args()
    by_name = {corner.name: corner for corner in CORNERS}
    if unknown := [name for name in arguments.corners if name not in by_name]:
        parser.error(f"{unknown[0]} is none of {', '.join(by_name)}")
    corners = [by_name[name] for name in arguments.corners or by_name]
    FOLDER.mkdir(exist_ok=True)
    rows, missing = [], []
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        finished: list[tuple[Corner, Checks, pathlib.Path]] = []
        for corner in corners:
            if not (python := corner.interpreter()):
                missing.append(corner)
                continue
            folder = pathlib.Path(scratch, corner.name)
            folder.mkdir()
            corner.log.write_bytes(b"")
            checks = Checks(corner, python, folder)
            if not checks.check("install", checks.install):
                rows.append((corner, ["?"] * 4, checks.results))
                continue
            rows.append((corner, checks.versions(), checks.results))
            checks.check("import", checks.import_all)
            has_run = checks.check("train", checks.train)
            checks.check("fit", checks.fit)
            if arguments.quick or not has_run:
                continue
            checks.keep_saved_run()
            checks.check("monitor", checks.monitor)
            if checks.check("resume", checks.resume):
                finished.append((corner, checks, folder))
            checks.check("fast tests", checks.test_fast)
        for corner, checks, _ in finished:
            for other, _, folder in finished:
                if other is not corner:
                    checks.check(f"a run of {other.name}", lambda run=folder, by=checks: by.resume_run_of(run))
    print_table(rows)
    for corner in missing:
        print(f"{corner.name}: not tested; there is no Python {corner.python} on PATH or in ~/.pyenv/versions")
    is_named_missing = any(corner.name in arguments.corners for corner in missing)
    return int(is_named_missing or any("FAILED" in results.values() for _, _, results in rows))


def print_table(rows: list[tuple[Corner, list[str], dict[str, str]]]) -> None:
    names = list(dict.fromkeys(name for _, _, results in rows for name in results))
    print("\n|", " | ".join(["corner", "Python", "TensorFlow", "Keras", "NumPy", *names]), "|")
    print("|" + "---|" * (5 + len(names)))
    for corner, versions, results in rows:
        print("|", " | ".join([corner.name, *versions, *(results.get(name, "-") for name in names)]), "|")


if __name__ == "__main__":
    sys.exit(main())
