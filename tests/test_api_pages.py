"""The API reference has an entry for each public name, whose docstring says what a caller needs; its examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re

import pytest

from crankshaft.launch.composition import open_run
from tests import promised
from tests.pages import ROOT

# The modules whose `__all__` is public; a name of several is that of the first.
MODULES = ("crankshaft", "crankshaft.engine.hooks")
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
ENGINE_MAKES = (
    "Axis",
    "Mesh",
    "Run",
    "Trainer",
    "Meter",
    "Segment",
    "Totals",
    "Window",
)  # classes that callers get, or subclass
ENTRIES = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M)]


def public(module: str) -> list[str]:
    """Reads a module's `__all__`, without importing it."""
    path = ROOT.joinpath(*module.split(".")[1:], "__init__.py")
    path = stub if (stub := path.with_suffix(".pyi")).exists() else path
    assigned = [each for each in ast.parse(path.read_text("utf-8")).body if isinstance(each, ast.Assign)]
    return next(ast.literal_eval(each.value) for each in assigned if ast.unparse(each.targets[0]) == "__all__")


def test_each_public_name_has_one_entry():
    names: dict[str, str] = {}
    for module in MODULES:
        for name in public(module):
            names.setdefault(name, f"{module}.{name}")
    assert sorted(ENTRIES) == sorted([*names.values(), *promised.EXTENSION_POINTS])


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_says_what_a_caller_needs_and_its_examples_run(entry):
    module, _, name = entry.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    text = inspect.getdoc(thing)
    made_by_callers = not inspect.isclass(thing) or not (name in ENGINE_MAKES or issubclass(thing, Exception))
    parameters = inspect.signature(thing).parameters.values() if made_by_callers else ()
    described = re.findall(r"^ +\*{0,2}(\w+): ", text, re.M)
    assert [each.name for each in parameters if each.name not in described] == []
    home = vars(inspect.getmodule(inspect.unwrap(thing)))
    found = doctest.DocTestParser().get_doctest(text, {**home}, entry, None, 0)
    assert found.examples or not made_by_callers, "give it an Example"
    report: list[str] = []
    doctest.DocTestRunner().run(found, out=report.append)
    assert not report, "".join(report)


def test_a_run_lists_what_programs_use():
    names = [name for name in dir(object.__new__(open_run.Run)) if not name.startswith("__")]
    assert names == sorted(open_run.SHOWN)
    assert "begin_loop" not in names
    assert [name for name in names if not hasattr(open_run.Run, name)] == ["is_open", "run_dir"]  # set on opening


def test_names_arguments_and_flags_that_a_release_has_promised_are_there():
    kept = (ROOT / "tests" / "promised.txt").read_text("utf-8").splitlines()
    assert set(kept) - set(promised.lines()) == set()
    assert {"crankshaft.fit(batch_size)", "crankshaft train --train_steps"} <= set(kept)
