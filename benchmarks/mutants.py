"""Which lines no test would miss: changes one token of the core at a time, and runs the tests that reach it.

The map says which tests run a line, and how long they take. It is made once, and a run with other tests adds to it:

  python -m benchmarks.mutants --map=FOLDER --measure -- -n 2 --dist loadfile -m "not slow and not clusters"

Changes are drawn from all that can be made of the files, by a seed; FILES are files and folders. Each is made in a copy
of the tree, where a fork of a process that has imported TensorFlow runs the cheapest tests:

  python -m benchmarks.mutants --map=FOLDER --seed=1 --number=40 --results=FILE engine/step engine/loop.py

A run with the same results judges only those that are not in them. `mutants_equal.jsonl` has those that change nothing
that anyone could see, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import collections
import compileall
import contextlib
import dataclasses
import difflib
import functools
import importlib
import itertools
import json
import os
import py_compile
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .markdown import table
from .mutants_plugin import Chosen, instrument, offsets, unpacked

ROOT = Path(__file__).resolve().parents[1]
CORE = ("engine", "launch", "runner")
EQUAL = Path(__file__).with_name("mutants_equal.jsonl")
OUTCOMES = ("killed", "equal", "survived", "not reached")
_IDENTITY = ("file", "name", "source", "change")
_TURNED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
_TURNED |= {"in": "not in", "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*"}
_TURNED |= {"|": "&", "&": "|"}
_LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_LOGS = {"logging", "logger"}
_FORKS = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a token or two: the bytes from `start` to `end` of a file become `new`.

    Attributes:
      name: the qualified name of the function or class that it is in, "" for none.
      source: the line, without its indent.
      change: old and new text.
      lines: a test that runs one of these lines reaches it: its statement's, or where that runs as the file is
        imported, all of what it is in.
    """

    file: str
    name: str
    source: str
    change: str
    line: int
    lines: range
    start: int
    end: int
    new: str

    @property
    def identity(self) -> tuple[str, ...]:
        """What stays as lines move."""
        return tuple(getattr(self, name) for name in _IDENTITY)

    def apply(self, data: bytes) -> bytes:
        return data[: self.start] + self.new.encode() + data[self.end :]


class _Source:
    """The bytes of a file, by the nodes of its syntax."""

    def __init__(self, data: bytes):
        self.data, self.lines = data, data.splitlines(keepends=True)
        self._before = [0, *itertools.accumulate(map(len, self.lines))]

    def start(self, node: ast.AST) -> int:
        return self._before[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self._before[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def between(self, node: ast.AST, first: ast.AST, second: ast.AST) -> tuple[str, str, str]:
        """Returns the node's text before, at and after the operator of two operands, which may be in parentheses."""
        ends = (self.start(node), self.end(first), self.start(second), self.end(node))
        return tuple(self.data[start:end].decode() for start, end in itertools.pairwise(ends))


def changes(root: Path, file: str) -> list[Change]:
    """Returns all changes that can be made of a file."""
    source = _Source((root / file).read_bytes())
    found, seen = list[Change](), collections.Counter[tuple]()
    for node, new, names, reach in _drawn(ast.parse(source.data), source, (), None, range(1, len(source.lines) + 1)):
        old = source.text(node)
        new += "\n" * (old.count("\n") - new.count("\n"))  # the lines below keep their numbers
        what = " ".join(f"{old} -> {new}".split())
        identity = (file, ".".join(names), source.lines[node.lineno - 1].decode().strip(), what)
        seen[identity] += 1
        if (count := seen[identity]) > 1:
            identity = (*identity[:3], f"{what} ({count})")
        written = new if isinstance(node, ast.stmt) else f"({new})"
        found.append(Change(*identity, node.lineno, reach, source.start(node), source.end(node), written))
    return found


def _drawn(node, source, names, statement, region) -> Iterator[tuple[ast.AST, str, tuple[str, ...], range]]:
    """Yields the changes of a node and of all below it: the node, its new text, where it is, and `Change.lines`.

    `region` has the lines of what the node is in, if it runs as the file is imported.
    """
    if isinstance(node, _LEFT_OUT) or _is_text(node):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    for changed, new in _changes_of(node, source):
        yield changed, new, names, region or range(statement.lineno, statement.lineno + 1)
    is_function = isinstance(node, ast.FunctionDef)
    if is_function or isinstance(node, ast.ClassDef):
        names = (*names, node.name)
        region = region and range(node.lineno, node.end_lineno + 1)
    left_out = {"annotation", "returns"} | ({"test", "body"} if _is_for_types(node) else set())
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in left_out:
                inner = None if is_function and field == "body" else region
                yield from _drawn(child, source, names, statement, inner)


def _changes_of(node: ast.AST, source: _Source) -> Iterator[tuple[ast.AST, str]]:
    """Yields the changes of this node itself: what changes, and its new text."""
    conditions = node.ifs if isinstance(node, ast.comprehension) else []
    if isinstance(node, ast.If | ast.While) and not _is_for_types(node):
        conditions = [node.test]
    for test in conditions:
        if not isinstance(test, ast.Constant):
            yield from ((test, value) for value in ("True", "False"))
    operands, kept = [], []  # the latter in place of the whole
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
    elif isinstance(node, ast.BinOp):
        operands = kept = [node.left, node.right]
    elif isinstance(node, ast.IfExp):
        kept = [node.body, node.orelse]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        kept = [node.operand]
    elif isinstance(node, ast.BoolOp):
        sign = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            yield node, sign.join(f"({source.text(each)})" for each in node.values if each is not left_out)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "pass"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    for first, second in itertools.pairwise(operands):
        before, gap, after = source.between(node, first, second)
        if turned := _TURNED.get(sign := " ".join(gap.strip("() \n").split())):
            yield node, f"{before}{gap.replace(sign, turned)}{after}"
    yield from ((node, source.text(operand)) for operand in kept)


def _is_text(node: ast.AST) -> bool:
    """Whether only words depend on it: a docstring, a `__repr__`, the log, an error, a sum of texts."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Expr | ast.AugAssign):
        return _is_text(node.value)
    if isinstance(node, ast.Call):
        words = ast.unparse(node.func).split(".")
        return words[-1].endswith("Error") or bool(_LOGS & {*words[:-1]})
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def drawn(root: Path, files: Sequence[str], seed: int) -> list[Change]:
    """Returns all changes of these files and folders, in an order by the seed."""
    paths = sorted(
        {path for file in files for path in ([root / file] if file.endswith(".py") else (root / file).rglob("*.py"))}
    )
    found = [change for path in paths for change in changes(root, str(path.relative_to(root)))]
    random.Random(seed).shuffle(found)
    return found


class Test(NamedTuple):
    """A test that reaches a line."""

    name: str
    seconds: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Map:
    """Which tests run the lines of a tree, which may have changed since the map was made."""

    def __init__(self, folder: Path, root: Path):
        self._folder, self._root = folder / "crankshaft", root
        self._numbers = offsets(self._folder)
        self._tests, noted = list[Test](), list[np.ndarray]()
        for line in (folder / "tests.jsonl").read_text().splitlines():
            each = json.loads(line)
            if (root / each["test"].partition("::")[0]).exists():
                self._tests.append(Test(each["test"], each["seconds"]))
                phases = [np.frombuffer(unpacked(each[phase]), bool) for phase in ("setup", "call")]
                noted.append(np.packbits(phases[0] | phases[1]))
        self._noted = np.stack(noted)
        self._of_file = functools.cache(self._read_file)

    def _read_file(self, file: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns which test ran which line of a file, and how much of it: a line counts by how few tests run it."""
        first = self._numbers.get(file, 0)
        last = first  # for a file that is newer than the map
        if file in self._numbers:
            last = min(number for number in self._numbers.values() if number > first)
        noted = np.unpackbits(self._noted[:, first // 8 : last // 8 + 1], 1)[:, first % 8 :][:, : last - first]
        return noted, noted @ (1 / np.maximum(noted.sum(0), 1))

    def reaching(self, change: Change) -> np.ndarray:
        """Returns which of the tests run one of the change's lines."""
        if change.file not in self._numbers:
            return np.zeros(len(self._tests), bool)
        at = _moved(self._folder / change.file, self._root / change.file)
        return self._of_file(change.file)[0][:, [at(line) for line in change.lines]].any(1)

    def cheapest(self, change: Change, seconds: float, without: set[str]) -> list[Test]:
        """Returns the tests to run, of at most so many seconds, file by file.

        Those come first that reach the change and run most, by their time, of what few tests run in its file: one
        from each file in turn. What time is left goes to others of these files: what a test asserts another may have
        run, in a fixture or a cache. Where none reaches it, all that run its file may: AutoGraph runs code that it
        has converted, which notes nothing.
        """
        _, shares = self._of_file(change.file)
        reaching = self.reaching(change)
        reaching = reaching if reaching.any() else shares > 0
        worth = [share / (0.5 + test.seconds) for test, share in zip(self._tests, shares, strict=True)]
        chosen, left = dict[str, list[Test]](), seconds
        for is_first in (True, False):
            turns, of_file = list[tuple[int, int]](), collections.Counter[str]()
            for number in sorted(range(len(self._tests)), key=worth.__getitem__, reverse=True):
                test = self._tests[number]
                is_wanted = reaching[number] if is_first else not reaching[number] and test.file in chosen
                if is_wanted and test.name not in without:
                    turns.append((of_file[test.file], number))
                    of_file[test.file] += 1
            for _, number in sorted(turns, key=lambda turn: turn[0]):
                test = self._tests[number]
                if test.seconds <= left:
                    chosen.setdefault(test.file, []).append(test)
                    left -= test.seconds
        return [test for each in chosen.values() for test in each]


@functools.cache
def _moved(old: Path, new: Path):
    """Returns a function of a line's number in `new`: its number in `old`, for a new line that of the one above."""
    texts = [path.read_text("utf-8").splitlines() for path in (old, new)]
    numbers, at = list[int](), 1
    blocks = iter(difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks())
    block = next(blocks)
    for line in range(len(texts[1])):
        while line >= block.b + block.size and block.size:
            block = next(blocks)
        if block.size and line >= block.b:
            at = block.a + line - block.b + 1
        numbers.append(at)
    return lambda line: numbers[line - 1]


class Judge:
    """Runs tests of changes, each in a copy of the tree."""

    def __init__(self, copies: Sequence[Path], arguments: argparse.Namespace):
        self._copies = queue.SimpleQueue[Path]()
        for copy in copies:
            self._copies.put(copy)
        self._arguments = arguments
        self._sound, self._unsound = set[str](), set[str]()  # tests that killed, and pass or fail without a change

    def judge(self, change: Change, of_lines: Map) -> dict:
        """Returns the outcome, and what killed the change."""
        copy, began = self._copies.get(), time.monotonic()
        try:
            while True:
                tests = of_lines.cheapest(change, self._arguments.seconds, self._unsound)
                tests = [Test(file, 0.0) for file in self._arguments.also] + tests
                if not tests:
                    return {"outcome": "not reached"}
                data = (copy / change.file).read_bytes()
                (copy / change.file).write_bytes(change.apply(data))
                try:
                    killer = self._run(copy, tests)
                finally:
                    (copy / change.file).write_bytes(data)
                is_test = "::" in killer
                if killer and killer not in self._sound and self._run(copy, [Test(killer, 10.0)] if is_test else tests):
                    if not is_test:
                        return {"outcome": "survived", "test": f"{killer}, without the change too"}
                    self._unsound.add(killer)  # here it fails in any case
                    continue
                self._sound |= {killer} if is_test else set()
                missed = "survived" if of_lines.reaching(change).any() else "not reached"
                found = {"outcome": "killed", "test": killer} if killer else {"outcome": missed}
                return found | {"tests": len(tests), "seconds": round(time.monotonic() - began, 1)}
        finally:
            self._copies.put(copy)

    def _run(self, copy: Path, tests: Sequence[Test]) -> str:
        """Runs tests in a fork; returns the one that failed, else what ended it, or "" if all pass."""
        failed = copy.parent / "failed"
        failed.write_text("")
        with _FORKS:
            child = os.fork()
            if not child:
                code = 70
                try:
                    code = _run_pytest(copy, tests, failed)
                finally:
                    os._exit(code)
        until = time.monotonic() + 60 + 4 * sum(test.seconds for test in tests) + 600 * bool(self._arguments.also)
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended[0]:
            os.waitpid(child, 0)
            return "the limit of time"
        code = os.waitstatus_to_exitcode(ended[1])
        return failed.read_text() or (f"exit code {code}" if code else "")


def _run_pytest(copy: Path, tests: Sequence[Test], failed: Path) -> int:
    """Runs in the fork: imports the package from the copy."""
    os.setsid()
    os.chdir(copy)
    with open(os.devnull) as nothing, (copy.parent / "log").open("w") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "tests", "crankshaft")]:
        del sys.modules[name]
    sys.path[:] = [
        str(copy.parent),
        *(path for path in sys.path if path and Path(path).resolve() not in (ROOT, ROOT.parent)),
    ]
    os.environ["PYTHONPATH"] = str(copy.parent)
    package = importlib.import_module("crankshaft")
    assert package.__file__ == str(copy / "__init__.py"), package.__file__
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest = importlib.import_module("pytest")
    files = dict.fromkeys(test.file for test in tests)
    return int(pytest.main([*options, *files], plugins=[Chosen([test.name for test in tests], failed)]))


def copy_tree(folder: Path) -> Path:
    """Copies what git would have of the tree into a folder; returns the copy, which is named as the package is."""
    copy = folder / "crankshaft"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def measure(folder: Path, arguments: Sequence[str]) -> int:
    """Runs tests by pytest in an instrumented copy of the tree, that of the map so far if there is one."""
    if not (folder / "crankshaft").exists():
        instrument(copy_tree(folder))
    paths = os.pathsep.join([str(folder), str(folder / "crankshaft")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutants_plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([*command, *arguments], cwd=folder / "crankshaft", env=environment, check=False).returncode


def report(results: Iterable[dict]) -> str:
    """Returns the tables: by room what became of the changes, and those that no test noticed."""
    by_room, missed = collections.defaultdict[str, collections.Counter](collections.Counter), list[list[str]]()
    for each in results:
        for room in ("/".join(each["file"].split("/")[:2]), "all"):
            by_room[room][each["outcome"]] += 1
        if each["outcome"] in ("survived", "not reached"):
            missed.append(
                [f"{each['file']}:{each['line']}", each["outcome"], f"`{each['source']}`", f"`{each['change']}`"]
            )
    rows = [
        [room, str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES)]
        for room, counts in sorted(by_room.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    missed = [[cell.replace("|", "\\|") for cell in row] for row in sorted(missed)]
    return "\n\n".join(
        [table(["room", "drawn", *OUTCOMES], rows), table(["line", "outcome", "source", "change"], missed, 4)]
    )


def share_killed(results: Iterable[dict]) -> float:
    """Returns the percentage of the changes that are killed, of those that are not equal."""
    counts = collections.Counter(each["outcome"] for each in results)
    return 100 * counts["killed"] / max(counts.total() - counts["equal"], 1)


def read(path: Path) -> dict[tuple[str, ...], dict]:
    """Returns the changes of a file of JSON lines by their identities; a later line stands for an earlier one."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {tuple(each[name] for name in _IDENTITY): each for each in map(json.loads, lines)}


def judge_all(arguments: argparse.Namespace) -> list[dict]:
    """Judges the changes that are not in the results, writes each there, and returns those of all that are drawn."""
    wanted = drawn(ROOT, arguments.files or CORE, arguments.seed)[: arguments.number]
    results = read(arguments.results)
    if arguments.again:
        results = {key: each for key, each in results.items() if each["outcome"] == "killed"}
    results |= {key: {**each, "outcome": "equal"} for key, each in read(EQUAL).items()}
    if unjudged := [change for change in wanted if change.identity not in results]:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, arguments.results.open("a") as out:
            for change, found in _judged(unjudged, Path(folder), arguments):
                results[change.identity] = dict(zip(_IDENTITY, change.identity, strict=True)) | found
                out.write(json.dumps(results[change.identity]) + "\n")
                out.flush()
                print(f"{change.file}:{change.line} {change.change}: {' '.join(map(str, found.values()))}", flush=True)
    return [{**results[change.identity], "line": change.line} for change in wanted]


def _judged(unjudged: Sequence[Change], folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[Change, dict]]:
    of_lines = Map(arguments.map, ROOT)
    for name in ("numpy", "pytest", "tensorflow", "keras"):
        importlib.import_module(name)
    first = copy_tree(folder / "0")
    # Compared with its source's hash, since a change may have its file's time and size.
    compileall.compile_dir(first, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    names = [folder / str(number) / "crankshaft" for number in range(1, arguments.processes)]
    judge = Judge([first, *(Path(shutil.copytree(first, name, symlinks=True)) for name in names)], arguments)
    with futures.ThreadPoolExecutor(arguments.processes) as pool:
        working = {pool.submit(judge.judge, change, of_lines): change for change in unjudged}
        for future in futures.as_completed(working):
            yield working[future], future.result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--map", type=Path, required=True, help="folder of the map, outside of this tree")
    parser.add_argument(
        "--measure", action="store_true", help="make the map, or add to it: pytest's arguments after --"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the changes (%(default)s)")
    parser.add_argument("--number", type=int, default=40, help="of changes (%(default)s)")
    parser.add_argument(
        "--results", type=Path, help="file of JSON lines; a later run continues (results.jsonl of the map)"
    )
    parser.add_argument("--again", action="store_true", help="judge again those that no test noticed")
    parser.add_argument("--also", nargs="*", default=[], help="files of tests to run first, such as new ones")
    parser.add_argument("--seconds", type=float, default=90.0, help="of tests for each change (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that run tests (%(default)s)")
    parser.add_argument("--at_least", type=float, default=0.0, help="exit code 1 below this percentage killed")
    parser.add_argument("files", nargs="*", help="files and folders (the core), or pytest's arguments")
    arguments = parser.parse_args()
    arguments.map = arguments.map.resolve()
    if arguments.measure:
        return measure(arguments.map, arguments.files)
    arguments.results = arguments.results or arguments.map / "results.jsonl"
    results = judge_all(arguments)
    print(f"\n{report(results)}\n\n{(share := share_killed(results)):.1f} % killed of those that are not equal")
    return int(share < arguments.at_least)


if __name__ == "__main__":
    sys.exit(main())
