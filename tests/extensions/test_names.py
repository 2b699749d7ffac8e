"""These tests import what a release promises, and extension points, alone."""

from __future__ import annotations

import ast
import pathlib

import pytest

pytestmark = pytest.mark.thorough

FOLDER = pathlib.Path(__file__).parent
PROMISED = (FOLDER.parent / "promised.txt").read_text("utf-8").splitlines()
NAMES = {line.removeprefix("extension point ").partition("(")[0] for line in PROMISED}


def imported(path: pathlib.Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes for alias in node.names if "crankshaft" in str(node.module)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_an_extension_imports_public_names_alone(path):
    assert imported(path) - NAMES == set()
