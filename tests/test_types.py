"""Editors and type checkers find the package and its names, and pass what the guides and examples show."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from tests.pages import GUIDES, ROOT, blocks

PYRIGHT = "pyright@1.1.414"
# What both checkers pass strictly, but for what TensorFlow and Keras leave unknown.
TYPED = """
# mypy: disallow-untyped-calls, disallow-untyped-defs, disallow-any-generics, no-implicit-reexport
# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false, reportMissingModuleSource=false
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from crankshaft import Data, KerasMetric, Mean, Run, Spec, Trainer, auc, fit, load_model, mean, open_run, run
from crankshaft import step_context
from crankshaft.engine.hooks import every_epoch


class Plane(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.error = KerasMetric(tf.keras.metrics.MeanAbsoluteError())

    def build_model(self) -> tf.keras.Model:
        return tf.keras.Sequential([tf.keras.layers.Dense(self.run_context.num_classes)])

    def loss(self, outputs: Any, batch: Any) -> dict[str, Mean]:
        errors = tf.square(outputs - batch[1])
        is_third = step_context().step % 3 == 0
        return {"near": mean(errors), "far": 0.1 * mean(errors, weights=is_third)}

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Mean]:
        return {"error": self.error(batch[1], outputs), "auc": auc(batch[1], outputs), "ones": Mean(2.0, 2.0)}


own: dict[str, Any] = {"rounds": 3}
done: Run = run(Plane, data=Data(np.zeros([4, 2]), None), train_steps=np.int64(3), run_dir=pathlib.Path("run"), **own)
run(Plane, data={"x": np.zeros(3)}, learning_rate=np.float32(0.1), gpus=0, freeze="body", model_arg={"units": 2})
print(Spec([None, 4], "float32").nbytes, done.model.predict(split="eval"), load_model("run").predict(split="eval"))
with open_run(Plane, hooks=[every_epoch(lambda status, metrics: print(metrics["loss"]))], debug=1) as opened:
    print(opened.train(steps=1)["loss"], opened.trainer.error, opened.history[-1]["step"])
fit(tf.keras.Sequential([]), [1.0], epochs=3, callbacks=[tf.keras.callbacks.CSVLogger("log")], seed=3)
"""
# Each line has a mistake.
WRONG = """
from crankshaft import Mean, Trainer, every_epoch, fit, load_model, open_run, run
from crankshaft.parts.sharding import Dence
run(Trainer, train_epoch=2)
run(Trainer, train_steps="many")
run(Trainer, hooks=print)
run(3)
open_run(Trainer).evalute()
open_run(Trainer).begin_loop()
open_run(Trainer).train(step=10)
open_run(Trainer).history[-1].loss
fit(Trainer, [1.0], train_steps=3)
load_model(3)
Mean(1.0)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment as `make install` makes it, whose packages are those of this one."""
    folder = tmp_path_factory.mktemp("types") / "env"
    venv.create(folder, with_pip=False)
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTHONPATH")}
    command = ["make", "-C", ROOT, "install", f"VENV={folder}", "VENV_PYTHON=true"]  # `true -m pip` installs nothing
    subprocess.run(command, check=True, env=variables, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_an_empty_folder_beside_a_script_does_not_hide_the_package(environment, tmp_path):
    (tmp_path / "crankshaft").mkdir()
    (tmp_path / "script.py").write_text("import crankshaft\nprint(crankshaft.__file__)")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / "python", tmp_path / "script.py"]
    found = subprocess.run(command, env=variables, capture_output=True, text=True).stdout
    assert pathlib.Path(found.strip()).resolve() == ROOT / "__init__.py"


def write_blocks(folder: pathlib.Path) -> None:
    """Writes each block of the guides as a module, which imports what it uses of earlier blocks of its page."""
    for page in GUIDES:
        homes: dict[str, str] = {}
        for block in blocks(page):
            if block.language != "python":
                continue
            name = f"{page.stem}_{block.title.removesuffix('.py') or block.line}"
            text = re.sub(r"^from (\w+) import", functools.partial(_of_page, page), block.text, flags=re.M)
            tree = ast.parse(text)
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            bound = set().union(*map(_bound, tree.body))
            before = "; ".join(f"from {homes[each]} import {each}" for each in sorted(used - bound) if each in homes)
            (folder / f"{name}.py").write_text(f"{before}\n" + "\n" * (block.line - 2) + text, encoding="utf-8")
            homes |= dict.fromkeys(bound, name)


def _of_page(page: pathlib.Path, match: re.Match) -> str:
    is_block = any(block.title == f"{match[1]}.py" for block in blocks(page))
    return f"from {page.stem}_{match[1]} import" if is_block else match[0]


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set().union(*map(_bound, ast.iter_child_nodes(node))) if not isinstance(node, ast.comprehension) else set()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of all that the guides show in Python, and of the examples."""
    folder = tmp_path_factory.mktemp("programs")
    write_blocks(folder)
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, folder)
    (folder / "typed.py").write_text(TYPED)
    (folder / "wrong.py").write_text(WRONG)
    return folder


def assert_finds_what_is_wrong(printed: str) -> None:
    found = set(re.findall(r"(\w+\.py:\d+):.* error: ", printed))
    assert found == {f"wrong.py:{line}" for line in range(2, len(WRONG.splitlines()) + 1)}, printed


@pytest.mark.thorough
def test_mypy_finds_mistakes_and_none_in_what_guides_and_examples_show(environment, programs):
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir=cache"]
    command += [f"--python-executable={environment / 'bin' / 'python'}", "."]
    assert_finds_what_is_wrong(subprocess.run(command, cwd=programs, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def pyright(tmp_path_factory):
    """The program, which npm gets from its registry."""
    folder = tmp_path_factory.mktemp("npm")
    program = folder / "node_modules" / ".bin" / "pyright"
    install = [
        "npm",
        "install",
        "--silent",
        "--fetch-retries=0",
        "--fetch-timeout=30000",
        f"--prefix={folder}",
        PYRIGHT,
    ]
    for command in (install, [program, "--version"]):
        if not shutil.which(command[0]) or subprocess.run(command).returncode:
            pytest.skip(f"npm can't install {PYRIGHT}, or it does not start")
    return program


@pytest.mark.thorough
def test_pyright_finds_mistakes_and_none_in_what_guides_and_examples_show(environment, programs, pyright):
    (programs / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic", "reportMissingImports": "none"}')
    command = [pyright, f"--pythonpath={environment / 'bin' / 'python'}"]
    assert_finds_what_is_wrong(subprocess.run(command, cwd=programs, capture_output=True, text=True).stdout)
