"""What counts as Crankshaft's own code: each of the package's folders and files, and nothing else."""

import ast
import functools
import importlib
import json
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Data
from crankshaft.engine import own_code
from crankshaft.engine.hooks import every_epoch
from docs.layout import FOLDERS, ROOT, source_files


def test_each_file_of_the_package_is_own_or_like_a_users():
    listed = (*own_code.OWN_FILES, *own_code.FILES_LIKE_USERS)
    package = [path for path in source_files(ROOT) if path.parts[0] in FOLDERS or len(path.parts) == 1]
    assert [path for path in package if not f"{own_code.ROOT}{path}".startswith(listed)] == []
    own = {str(path.parts[0]) for path in package if f"{own_code.ROOT}{path}".startswith(own_code.OWN_FILES)}
    assert own == {"engine", "launch", "parts", "runner", "__init__.py", "__main__.py"}


def test_what_is_beside_the_package_is_the_users():
    for name in ("examples/own_step.py", "tests/bench.py", "engine_of_mine/a.py", "a.py"):
        assert not str(ROOT / name).startswith((*own_code.OWN_FILES, *own_code.FILES_LIKE_USERS))
        assert own_code.is_users(str(ROOT / name))


def test_code_outside_site_packages_is_the_users_but_for_pythons_and_the_packages_own():
    for file in ("/home/me/a.py", "/home/me/lib/python/a.py", "<stdin>", f"{own_code.ROOT}models/mlp.py"):
        assert own_code.is_users(file)
    for file in (
        *(json.__file__, "<string>", "<frozen runpy>", "/tmp/__autograph_generated_file8h.py", tf.__file__),
        *(f"{own_code.ROOT}runner/base.py", keras.layers.__file__),
    ):
        assert not own_code.is_users(file)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(path, body)` writes a module of a site-packages that Python searches, and imports it."""
    monkeypatch.setattr(own_code, "passed_packages", set())
    site = tmp_path / "lib" / "python3" / "site-packages"
    monkeypatch.syspath_prepend(site)

    written = []

    def write(path, body=""):
        written.append(path.removesuffix(".py").partition("/")[0])
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(body)
        importlib.invalidate_caches()
        return importlib.import_module(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in written]:
        del sys.modules[name]


FUNCTION = "def function(*_): pass\n"
HOOK = "from crankshaft.engine.hooks import Hook\nclass Mine(Hook): pass\n"
SOURCE = "from crankshaft import Source\nclass Mine(Source): __len__ = read = len\n"
LAYER = "import keras\nclass Mine(keras.layers.Layer): pass\n"
CALLBACK = "import keras\nclass Mine(keras.callbacks.Callback): pass\n"


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        (FUNCTION, lambda m: m.function),
        (FUNCTION, lambda m: {"data": functools.partial(m.function, 1)}),
        (FUNCTION, lambda m: [every_epoch(m.function)]),
        (HOOK, lambda m: m.Mine),
        (CALLBACK, lambda m: (None, [m.Mine()])),
        ("class Mine:\n    def __call__(self): pass\n", lambda m: m.Mine()),
        (FUNCTION, lambda m: compiled(loss={"a": m.function})),
        (LAYER, lambda m: keras.Sequential([m.Mine()])),
        (SOURCE, lambda m: Data(None, evaluation=m.Mine())),
    ],
    ids=["function", "partial", "every_epoch", "class", "callback", "callable", "loss", "layer", "Data"],
)
def test_a_package_in_site_packages_is_the_users_once_its_code_is_passed(installed, body, passed):
    installed("mine/__init__.py")
    module = installed("mine/parts/losses.py", body)
    vendored, other = installed("mine/vendored/lib.py"), installed("mine_too/__init__.py")
    assert not own_code.is_users(module.__file__)
    own_code.note_passed(passed(module))
    assert [own_code.is_users(each.__file__) for each in (module, vendored, other)] == [True, True, False]
    assert not own_code.is_users(keras.callbacks.__file__)


def compiled(loss):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def test_of_a_namespace_its_package_is_the_users_and_a_module_is_alone(installed):
    installed("company/vision/__init__.py")
    module, beside = installed("company/vision/train.py", FUNCTION), installed("company/text/__init__.py")
    bare, alone = installed("bare/train.py", FUNCTION), installed("single.py", FUNCTION)
    own_code.note_passed(module.function, alone.function)
    users = [own_code.is_users(each.__file__) for each in (module, beside, bare, alone)]
    assert users == [True, False, False, True]
    own_code.note_file(bare.__file__)
    assert own_code.is_users(installed("bare/data.py").__file__)


def test_a_library_whose_values_are_passed_stays_one(installed):
    table = installed("tables.py", "class Table: pass\n").Table()
    own_code.note_passed((table, np.ones(3)), tf.data.Dataset.range(3), keras.callbacks.History())
    assert not own_code.passed_packages


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
