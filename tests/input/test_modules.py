"""What holds for every module in `input`: how it is found, described, and started."""

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import crankshaft.input
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

ROOT = os.path.dirname(os.path.dirname(crankshaft.input.__file__))
MODULES = [
    importlib.import_module(f"crankshaft.input.{m.name}") for m in pkgutil.iter_modules(crankshaft.input.__path__)
]
SOURCES = [module for module in MODULES if hasattr(module, "load")]


def test_shipped_sources_are_found():
    names = {module.__name__.removeprefix("crankshaft.input.") for module in SOURCES}
    assert {"criteo", "digits", "fashion_mnist", "mnist", "synthetic", "synthetic_clicks"} <= names


@pytest.mark.parametrize("module", SOURCES, ids=lambda module: module.__name__)
def test_load_takes_folder_seed_and_arguments_with_typed_defaults(module):
    first, second, *arguments = inspect.signature(module.load).parameters.values()
    assert (first.name, second.name) == ("data_dir", "seed")
    for argument in arguments:
        assert argument.kind is argument.KEYWORD_ONLY
        if argument.name not in ("eval_data_dir", "trained_on"):  # which the configuration fills
            assert isinstance(argument.default, (int, float, bool, str, tuple))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_first_line_describes_the_module(module):
    first_line = module.__doc__.splitlines()[0]
    assert first_line.endswith(".")
    assert len(first_line) < 100


def test_importing_and_reading_does_not_start_tensorflow():
    program = (
        "import importlib, pkgutil, sys, crankshaft.input\n"
        "for m in pkgutil.iter_modules(crankshaft.input.__path__):\n"
        "    importlib.import_module('crankshaft.input.' + m.name)\n"
        "sys.modules['crankshaft.input.digits'].load(None, 0)\n"
        "sys.modules['crankshaft.input.synthetic'].load(None, 0, examples=1, eval_examples=1)\n"
        "try: sys.modules['crankshaft.input.mnist'].load('absent', 0)\n"
        "except ValueError: pass\n"
        "print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
