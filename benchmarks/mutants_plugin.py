"""Which lines of the package a test runs, in all of its processes: a plugin of pytest, and the code that it reads from.

`instrument` writes, in a copy of the tree, bytecode that notes each statement before it runs in a file that all
processes map: so a process that is killed, replaced or forked has noted all that it ran, and no tracer slows TensorFlow
down. The sources stay as they are. While pytest runs a test, all that is noted is that test's.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import marshal
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

FLOORS = ("engine", "runner", "launch", "parts")  # whose lines are noted
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)  # a .pyc that Python does not compare with its source
# In each process that imports the package, in the name of its builtins. Who is not told whose process it is, notes
# nothing.
_OPEN = """
import builtins, mmap, os
try:
    with open(os.path.join({folder!r}, "noted." + os.environ.get("PYTEST_XDIST_WORKER", "main")), "r+b") as file:
        builtins.__noted__ = mmap.mmap(file.fileno(), 0)
except OSError:
    builtins.__noted__ = mmap.mmap(-1, {size})
del builtins, mmap, os
"""


def offsets(root: Path) -> dict[str, int]:
    """Returns for each file whose lines are noted the number before that of its first line, and that of all, as ""."""
    found, lines = {}, 0
    for path in sorted(path for floor in FLOORS for path in (root / floor).rglob("*.py")):
        found[str(path.relative_to(root))] = lines
        lines += len(path.read_bytes().splitlines()) + 1
    return found | {"": lines}


def instrument(root: Path) -> None:
    """Writes the bytecode of a copy of the tree, whose notes go into the folder that it is in."""
    of_files = offsets(root)
    noted = root.parent / "noted.main"
    noted.write_bytes(bytes(of_files.pop("")))
    for file, offset in of_files.items():
        tree = ast.parse((root / file).read_bytes())
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, name, None), list):
                    setattr(node, name, [each for statement in block for each in _noting(statement, offset)])
        _write(root / file, tree)
    tree = ast.parse((root / "__init__.py").read_bytes())
    tree.body[1:1] = ast.parse(_OPEN.format(folder=str(root.parent), size=noted.stat().st_size)).body
    _write(root / "__init__.py", tree)


def _noting(statement: ast.stmt, offset: int) -> list[ast.stmt]:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)  # maybe a docstring
    if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
        return [statement]
    (note,) = ast.parse(f"__noted__[{offset + statement.lineno}] = 1").body
    for node in ast.walk(note):
        ast.copy_location(node, statement)
    return [note, statement]


def _write(path: Path, tree: ast.Module) -> None:
    compiled = Path(importlib.util.cache_from_source(str(path)))
    compiled.parent.mkdir(exist_ok=True)
    code = compile(tree, str(path), "exec", dont_inherit=True)
    compiled.write_bytes(importlib.util.MAGIC_NUMBER + _UNCHECKED + marshal.dumps(code))


def packed(noted: bytes) -> str:
    return base64.b85encode(zlib.compress(noted)).decode()


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


class Noting:
    """Appends a line to `tests.jsonl` for each test that passed: how long it took, what its setup ran, and its call."""

    def __init__(self, folder: Path):
        self._folder = folder
        path = folder / f"noted.{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
        path.write_bytes(bytes((folder / "noted.main").stat().st_size))
        with path.open("r+b") as file:
            self._noted = mmap.mmap(file.fileno(), 0)
        self._test: dict = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._noted[:] = bytes(len(self._noted))
        self._test = {"test": item.nodeid, "seconds": 0.0, "passed": True}
        done = yield
        if self._test.pop("passed"):
            line = json.dumps({**self._test, "call": packed(self._noted[:])}) + "\n"
            with (self._folder / "tests.jsonl").open("ab", buffering=0) as file:  # each in one piece
                file.write(line.encode())
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        self._test["setup"] = packed(self._noted[:])
        self._noted[:] = bytes(len(self._noted))
        return (yield)

    def pytest_runtest_logreport(self, report):
        if self._test:  # not where the workers' reports come together
            self._test["seconds"] = round(self._test["seconds"] + report.duration, 2)
            self._test["passed"] &= report.passed


def pytest_configure(config):
    config.pluginmanager.register(Noting(Path(config.rootpath).parent))


class Chosen:
    """Runs these tests, or all of a file, in this order, and writes the name of the first that fails."""

    def __init__(self, names: Sequence[str], failed: Path):
        self._order, self._failed = {name: n for n, name in enumerate(names)}, failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        of_item = {
            item: self._order.get(item.nodeid, self._order.get(item.nodeid.partition("::")[0])) for item in items
        }
        items[:] = sorted((item for item in items if of_item[item] is not None), key=of_item.__getitem__)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.write_text(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self._failed.write_text(report.nodeid)
