"""A user's script beside files of the project's names: from the checkout's install, and from a wheel elsewhere."""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import pytest

from crankshaft.engine.version import __version__
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = """
from crankshaft import Trainer, main, mean

import input, engine, launch  # the user's own
from models.plane import make, points
import tensorflow as tf


class Plane(Trainer):
    def build_model(self):
        return make()

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1])[:, 0])


def data():
    return points(96), points(32)


if __name__ == "__main__":
    assert (input.MINE, engine.MINE, launch.MINE) == (1, 2, 3)
    main(Plane, data=data)
"""
MODEL = """
import numpy as np
import tensorflow as tf


def make():
    return tf.keras.Sequential([tf.keras.layers.Dense(1)])


def points(count):
    found = np.random.default_rng(count).normal(size=(count, 3)).astype("float32")
    return found, found @ np.ones([3, 1], "float32")
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a script, a package `models` and modules of the project's names."""
    folder = tmp_path / "project"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "plane.py").write_text(MODEL)
    for number, name in enumerate(("input", "engine", "launch"), 1):
        (folder / f"{name}.py").write_text(f"MINE = {number}\n")
    (folder / "script.py").write_text(SCRIPT)
    return folder


def run(python, folder, *arguments):
    done = subprocess.run(
        [python, *arguments, "--train_steps=4", "--global_batch_size=32", "--jit=off", f"--run_dir={folder}/run"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "run" / "result.json").read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(Python, its site-packages) of an environment in which the wheel is installed, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(built, check=True, timeout=PATIENCE, capture_output=True)
    (wheel,) = folder.glob("crankshaft_train-*.whl")
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(packages), str(wheel)], check=True, timeout=PATIENCE)
    # What it depends on: a folder on the path, whose own .pth files, the checkout's among them, are not read.
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "env" / "bin" / "python", packages


def test_a_wheel_installs_one_package(installed):
    python, packages = installed
    ours = {path.name for path in packages.iterdir()} - {"others.pth", "bin", "__pycache__"}
    assert {name for name in ours if not name.endswith(".dist-info")} == {"crankshaft"}
    for name in (
        "py.typed",
        "__init__.pyi",
        "input/data/digits.csv.gz",
        "launch/command.py",
        "parts/dashboard/assets/page.html",
    ):
        assert (packages / "crankshaft" / name).exists()
    assert not (packages / "crankshaft" / "tests").exists()
    done = subprocess.run(
        [
            *(python, "-c"),
            "import crankshaft, importlib.metadata;"
            "print(crankshaft.__file__, importlib.metadata.version('crankshaft-train'), sep='\\n')",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [str(packages / "crankshaft" / "__init__.py"), __version__]


@pytest.mark.slow
def test_a_script_beside_such_names_trains_from_the_checkout(project):
    assert run(sys.executable, project, "script.py")["step"] == 4


def test_a_worker_trains_from_a_wheel(project, installed):
    """Its supervisor and it are processes of that environment."""
    result = run(installed[0], project, "-m", "crankshaft", "local", "--workers=1", "--", "script.py")
    assert (result["step"], result["strategy"]) == (4, "multi_worker")
