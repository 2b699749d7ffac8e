"""BUILD.md's map is of the code as it is: its rooms, where they run, and what they touch. Starts no TensorFlow."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from docs.layout import ROOT, code_lines, imports, names_in, rooms
from tests.test_imports import (
    COMPOSING,
    HOST_CODE,
    MAY_IMPORT,
    PARTS,
    attributes,
    dotted,
    is_host_code,
    is_within,
    readings,
)

# What touches files, the network and variables; `readings` finds flags and the environment.
_FILE_MODULES = {
    *("filelock", "shutil", "tempfile"),
    *("crankshaft.engine.machine.files", "crankshaft.input.files.storage", "crankshaft.runner.host.text_files"),
}
_OF_FILES = {
    *(f"os.{name}" for name in ("listdir", "makedirs", "mkdir", "open", "remove", "rename", "replace", "rmdir")),
    *(f"os.{name}" for name in ("link", "lstat", "scandir", "stat", "symlink", "truncate", "unlink", "utime", "walk")),
    *(f"os.path.{name}" for name in ("exists", "getsize", "isdir", "isfile")),
    *("tensorflow.io.gfile", "tensorflow.raw_ops.SaveV2"),
}
_OF_PATHS = {"read_bytes", "read_text", "write_bytes", "write_text"}
_NOT_OF_FILES = {"crankshaft.runner.host.text_files.finite", "shutil.get_terminal_size"}
_NETWORK_MODULES = {"grpc", "http", "socketserver", "ssl", "urllib.request"}
_OF_NETWORK = {"socket.create_connection", "socket.create_server", "socket.socket", "tensorflow.distribute.Server"}
_COLLECTIVE = re.compile(r"\b(?:context|replica)\.all_(?:reduce|gather)$|\.Collective\w+$")
_CHANGES = {"add_weight", "assign", "assign_add", "assign_sub"}
_OF_VARIABLES = re.compile(r"tf\.Variable$|raw_ops\.(?:Assign\w*VariableOp|Resource(?:Apply|Scatter|SparseApply)\w+)$")


def touched(path: Path) -> set[str]:
    """What the code of a file touches itself: flags (or the environment), files, the network, variables."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {name for _, name in attributes(tree, path)}
    imported = {name for _, name, _ in imports(tree, path)}
    modules = {name for name in imported if is_within(name, _FILE_MODULES)}
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = set(map(dotted, called))
    methods = {function.attr for function in called if isinstance(function, ast.Attribute)}
    found = {
        "flags": bool(readings(tree, path)),
        "files": "open" in texts
        or bool(methods & _OF_PATHS)
        or any(is_within(name, _OF_FILES) for name in names)
        or any(name not in {"shutil"} | _NOT_OF_FILES for name in modules)
        or any(name.startswith("shutil.") and name not in _NOT_OF_FILES for name in names),
        "network": any(is_within(name, _NETWORK_MODULES) for name in imported)
        or bool(names & _OF_NETWORK)
        or any(_COLLECTIVE.search(text) for text in texts),
        "variables": bool(methods & _CHANGES) or any(_OF_VARIABLES.search(text) for text in texts),
    }
    return {name for name, is_found in found.items() if is_found}


class Row(NamedTuple):
    """A row of the map: some rooms, or a part, where they run, and what they touch."""

    rooms: list[str]
    runs_on: str
    touches: set[str]
    joined_by: set[str] | None  # a part's


def map_rows() -> list[Row]:
    text = (ROOT / "BUILD.md").read_text(encoding="utf-8").split("## The map")[1].split("## ")[0]
    found = []
    for line in re.findall(r"^\| `.*\|$", text, re.M):
        names, *middle, runs_on, touches, _ = (cell.strip() for cell in line.strip("|").split("|"))
        joined_by = set(filter(None, middle[-1].split(", "))) if len(middle) > 1 else None
        found.append(Row(names_in(names), runs_on, set(filter(None, touches.split(", "))), joined_by))
    return found


def where_it_runs(room: str) -> str:
    """What the first line of a room, or else of its floor, says at its end: host, replica, or both."""
    floor = room.partition("/")[0]
    for path in (f"{room}__init__.py" if room.endswith("/") else room, f"{floor}/__init__.py"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        last_sentence = ast.get_docstring(tree).partition("\n")[0].rpartition(". ")[2].lower()
        words = [word for word in ("host", "replica") if word in last_sentence]
        if words:
            return "both" if len(words) > 1 else words[0]
    return ""


def test_the_map_has_each_room_once():
    assert sorted(name for row in map_rows() for name in row.rooms) == sorted(rooms())
    assert {name.partition("/")[0] for name in rooms()} == set(MAY_IMPORT)


def test_the_map_says_where_a_room_runs_as_its_first_line_does():
    rows = {name: row.runs_on for row in map_rows() for name in row.rooms}
    assert rows == {name: where_it_runs(name) for name in rows}


def test_only_code_of_the_host_may_read_flags_and_rooms_of_it_alone_run_there():
    """By tests/test_imports.py, whose `HOST_CODE` lists the files of parts that run on the host alone."""
    for row in map_rows():
        for name in row.rooms:
            paths = rooms()[name]
            if all(map(is_host_code, paths)):
                assert row.runs_on == "host", name
            if not any(map(is_host_code, paths)):
                assert "flags" not in row.touches, name
    assert {part for part, files in HOST_CODE.items() if files == "all"} <= set(PARTS)


def test_the_map_says_what_a_room_touches_as_its_code_does():
    rows = {name: row.touches for row in map_rows() for name in row.rooms}
    assert rows == {name: set().union(*map(touched, rooms()[name])) for name in rows}


def test_the_map_says_which_file_of_launch_joins_a_part_to_a_run():
    joins: dict[str, set[str]] = {f"parts/{part}/": set() for part in PARTS}
    for path, parts in COMPOSING.items():
        for part in parts:
            joins[f"parts/{part}/"].add(Path(path).stem)
    assert {name: row.joined_by for row in map_rows() for name in row.rooms if row.joined_by is not None} == joins


def test_lines_of_code_are_those_without_comments_docstrings_and_blank_lines():
    text = '"""A file."""\n\nimport a  # why\n\n# Alone.\nx = """one\ntwo"""\n\n\ndef f():\n    """It."""\n'
    assert code_lines(text) == 4
