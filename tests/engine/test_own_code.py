"""What counts as Crankshaft's own code: each of the package's folders and files, and nothing else."""

import ast
import pathlib

from crankshaft.engine import own_code
from docs.layout import FOLDERS, ROOT, source_files


def test_each_file_of_the_package_is_own_or_like_a_users():
    listed = (*own_code.OWN_FILES, *own_code.FILES_LIKE_USERS)
    package = [path for path in source_files(ROOT) if path.parts[0] in FOLDERS or len(path.parts) == 1]
    assert [path for path in package if not f"{own_code.ROOT}{path}".startswith(listed)] == []
    own = {str(path.parts[0]) for path in package if f"{own_code.ROOT}{path}".startswith(own_code.OWN_FILES)}
    assert own == {"engine", "launch", "parts", "runner", "__init__.py", "__main__.py"}


def test_what_is_beside_the_package_is_the_users():
    for name in ("examples/own_step.py", "tests/bench.py", "engine_of_mine/a.py", "a.py"):
        assert not f"{own_code.ROOT}{name}".startswith((*own_code.OWN_FILES, *own_code.FILES_LIKE_USERS))
    assert not "crankshaft.models.mlp".startswith(own_code.OWN_MODULES)
    assert "crankshaft.runner.base".startswith(own_code.OWN_MODULES)


def test_nothing_else_lists_the_folders():
    """Who tells own code by a list of its own would miss a folder that comes."""
    lists = []
    for path in source_files(ROOT):
        if path.parts[0] not in FOLDERS or path == pathlib.Path("engine/own_code.py"):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                words = {each.value for each in node.elts if isinstance(each, ast.Constant)}
                if (
                    len(
                        words
                        & {
                            f"{before}{folder}{after}"
                            for folder in FOLDERS
                            for before in ("", "crankshaft.")
                            for after in ("", ".")
                        }
                    )
                    > 1
                ):
                    lists.append(f"{path}:{node.lineno}")
    assert lists == []
