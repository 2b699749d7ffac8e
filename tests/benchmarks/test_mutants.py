"""Changes of the core that a test should notice: what is drawn, and what becomes of it, in a tree of three files."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from benchmarks import mutants
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

CODE = '''\
"""Three functions."""


def held(x):
    """Returns whether a number is positive."""
    if x > 0:
        return 1
    return 0


def in_a_process(x):
    print(x * 3, flush=True)


def ignored(x):
    y = x + 1


def never(x):
    return x / 2


def told(x):
    raise ValueError(x + 1)
'''
TESTS = """\
import subprocess
import sys

from crankshaft.engine.code import held, ignored


def test_held():
    assert [held(n) for n in (-1, 0, 1)] == [0, 0, 1]
    ignored(1)


def test_in_a_process_that_ends_at_once():
    code = "import os; from crankshaft.engine import code; code.in_a_process(2); os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"6\\n"
"""
EQUAL = (
    '{"file": "engine/code.py", "name": "ignored", "source": "y = x + 1", "change": "1 -> 2", "reason": "not read"}\n'
)


def test_what_is_drawn_is_a_seeds_and_keeps_the_files_lines():
    first, second = mutants.drawn(ROOT, ["engine/reduction"], 1), mutants.drawn(ROOT, ["engine/reduction"], 2)
    assert first == mutants.drawn(ROOT, ["engine/reduction"], 1)
    assert first != second
    assert {*first} == {*second}
    assert len({change.identity for change in first}) == len(first) > 100
    for change in first:
        data = (ROOT / change.file).read_bytes()
        changed = change.apply(data)
        assert changed != data
        compile(changed, change.file, "exec")
        assert changed.count(b"\n") == data.count(b"\n")


def test_notes_of_equal_changes_are_of_the_code_as_it_is():
    notes = mutants.read(mutants.EQUAL)
    assert all(note["reason"] for note in notes.values())
    assert notes.keys() <= {
        change.identity for file in {key[0] for key in notes} for change in mutants.changes(ROOT, file)
    }


@pytest.mark.thorough
def test_each_change_of_a_tree_is_killed_equal_survives_or_is_not_reached(tmp_path):
    tree = tmp_path / "crankshaft"
    for file, text in {
        "__init__.py": '"""A package."""\n',
        "engine/__init__.py": "",
        "engine/code.py": CODE,
        "tests/test_code.py": TESTS,
        "benchmarks/mutants_equal.jsonl": EQUAL,
    }.items():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)
    for name in ("mutants", "mutants_plugin", "markdown"):
        shutil.copy(ROOT / f"benchmarks/{name}.py", tree / "benchmarks")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    first = _mutants(tree, "--measure", "--", "-p", "no:xdist")
    assert first.returncode == 0, first.stdout
    found = _mutants(tree, "--number=100", "--at_least=61")
    assert found.returncode == 0, found.stdout + found.stderr
    outcomes = {(each["name"], each["outcome"]) for each in mutants.read(tmp_path / "map" / "results.jsonl").values()}
    assert outcomes == {
        ("held", "killed"),
        ("in_a_process", "killed"),
        ("ignored", "survived"),
        ("never", "not reached"),
    }
    assert "| engine/code.py | 19 | 11 | 1 | 3 | 4 |" in found.stdout
    again = _mutants(tree, "--number=100", "--at_least=62")
    assert again.returncode == 1
    assert again.stdout == found.stdout[found.stdout.index("\n|") :]  # nothing is judged twice


def _mutants(tree, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.mutants", f"--map={tree.parent / 'map'}", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=PATIENCE, check=False)
