"""What the distribution installs: one package, `crankshaft`, with every folder of the project in it."""

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

import crankshaft
from crankshaft.engine.internals import supported
from crankshaft.engine.version import build

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "input", "launch", "models", "parts", "runner")


def test_setup_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = {path.parent.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    assert set(setup["options"]["packages"].split()) == {"crankshaft", *(".".join(("crankshaft", *p)) for p in found)}


def test_names_are_there_and_others_are_not():
    assert {name for name in dir(crankshaft) if not name.startswith("__")} == {*crankshaft.__all__}
    assert {"Mean", "Trainer", "main", "mean", "__version__"} <= set(dir(crankshaft))
    assert crankshaft.Trainer.__module__ == "crankshaft.engine.trainer"
    with pytest.raises(AttributeError, match="'crankshaft' has no attribute 'Trainr'"):
        _ = crankshaft.Trainr


@pytest.mark.parametrize("name", ["Trainer", pytest.param("main", marks=pytest.mark.slow)])
def test_tensorflow_starts_without_a_word_where_crankshaft_imports_it(name):
    one = "*tf.data.Dataset.from_generator(lambda: [1], tf.int32).as_numpy_iterator()"
    code = f"from crankshaft import {name}; import tensorflow as tf; print({one}, '{name}')"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"1 {name}\n"), done.stderr
    assert "oneDNN" not in done.stderr
    assert "cudart" not in done.stderr
    assert "Memory patch" not in done.stderr


@pytest.mark.slow
def test_a_script_of_a_worker_is_as_quiet_as_the_program():
    """A lost peer is a line of ours; TensorFlow's pages about it are left out from its start, or not at all."""
    code = "from crankshaft import Trainer; import os; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    for more, level in (([], "3"), (["--debug"], "1")):
        done = subprocess.run(
            [sys.executable, "-c", code, *more],
            env={**environment, "TF_CONFIG": "{}"},
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{level}\n", done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_name_in_the_checkout_is_told(folder):
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        last == f"ImportError: {folder} is a part of crankshaft; "
        f"write `import crankshaft.{folder}` instead of `import {folder}`"
    )


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_the_command_alone_lists_its_commands(arguments):
    done = subprocess.run([sys.executable, "-m", "crankshaft", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("train", "local", "prepare", "ask", "monitor", "report"):
        assert f"\n  {name} " in done.stdout


def test_a_wrong_command_is_one_line_and_the_version_another(tmp_path):
    commands = "train, local, plan, prepare, ask, monitor, report"
    for word, hint in (
        ("trian", "did you mean train?"),
        ("fly", f"use one of {commands}"),
        ("benchmark", "use crankshaft train --mode=benchmark"),
        ("--seed=3", f"flags stand after one of {commands}"),
    ):
        done = subprocess.run([sys.executable, "-m", "crankshaft", word], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: crankshaft {word} is not a command; {hint}\n"
    done = subprocess.run([sys.executable, "-m", "crankshaft", "--version"], capture_output=True, text=True)
    shown = re.fullmatch(r"crankshaft (\S+) \(build ([0-9a-f]{12})(?:, commit [0-9a-f]{8})?\)\n", done.stdout)
    assert (done.returncode, shown[1], shown[2]) == (0, crankshaft.__version__, build())
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == crankshaft.__version__
    assert f"\nversion: {crankshaft.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    for name, least in supported.LEAST.items():
        assert f"{name}>={least}" in setup["options"]["install_requires"]


def test_a_build_is_told_by_its_files_and_a_commit_by_its_own_git(tmp_path):
    for folder in ("engine", "parts"):
        shutil.copytree(ROOT / folder, tmp_path / "crankshaft" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / file, tmp_path / "crankshaft")
    script = "from crankshaft.engine import version; print(version.build(), version.commit())"

    def told():
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout.split()

    first = told()
    assert first[1] == "None"
    git = tmp_path / "crankshaft" / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs with: peeled\n" + 40 * "a" + " refs/heads/main\n")
    assert told() == [first[0], 40 * "a"]
    (git / "HEAD").write_text(40 * "b" + "\n")
    with open(tmp_path / "crankshaft/parts/__init__.py", "a") as file:
        file.write("# edited\n")
    build, commit = told()
    assert (build != first[0], commit) == (True, 40 * "b")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import json; json.lod", r"^ImportError: Trainer can't be imported \(.*'json' has no attribute 'lod'\)$"),
        (
            "mine = 1",
            r"UsageError: the module tensorflow is \S+/tensorflow.py, and not the library; rename or remove it",
        ),
    ],
    ids=["broken", "another"],
)
def test_why_tensorflow_cannot_be_imported_is_the_message(tmp_path, body, reason):
    (tmp_path / "tensorflow.py").write_text(body)
    (tmp_path / "program.py").write_text("from crankshaft import Trainer")
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert re.search(reason, done.stderr.strip().splitlines()[-1]), done.stderr


def test_a_process_that_has_loaded_an_older_library_is_told_to_restart(monkeypatch):
    monkeypatch.setattr("keras.__version__", "3.10.0")
    line = r"loaded keras 3.10.0, and Crankshaft needs 3.12 or newer; install that .* and restart the kernel"
    with pytest.raises(crankshaft.UsageError, match=line):
        supported.refuse_other_libraries()


def test_tf_keras_of_keras_2_is_refused_in_a_process_that_has_loaded_tensorflow(monkeypatch):
    monkeypatch.setattr("tensorflow.keras", types.SimpleNamespace(Model=type("Model", (), {})))
    with pytest.raises(crankshaft.UsageError, match=r"tf.keras is Keras 2 .*, by TF_USE_LEGACY_KERAS, .*; unset it"):
        supported.refuse_other_libraries()


@pytest.mark.thorough
def test_keras_2_is_refused_where_it_is_not_installed_too():
    """As its loader finds no package tf_keras, TensorFlow says of Keras itself that it is not installed."""
    code = (
        "import sys; sys.modules['tf_keras'] = None\n"
        "import tensorflow, crankshaft\n"
        "try: crankshaft.Trainer\n"
        "except crankshaft.UsageError as error: print(error)"
    )
    variables = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.stdout.startswith("tf.keras is Keras 2 in this process, by TF_USE_LEGACY_KERAS"), done.stderr
