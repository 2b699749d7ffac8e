"""The architecture's rules, read from the source by `ast`: which folder may import what, who may read flags
and the environment, what tests may look at. Imports nothing that it checks."""

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from docs.layout import OF_KERAS_MODELS, ROOT, arrows, between_folders, circles, imports, source_files, updated

# What a file may import besides the standard library and its own folder, by the longest name that is still allowed:
# `absl.flags` lets in neither `absl` nor `absl.logging`. The floors, from the top, are launch, models, parts, runner,
# input and engine; an arrow points down.
_OF_REPLICAS = {"keras", "numpy", "tensorboard", "tensorflow"}
_OF_HOSTS = {
    *("absl.app", "absl.flags", "absl.testing"),
    *("absl.logging.PythonFormatter", "absl.logging.get_absl_handler", "absl.logging.use_absl_handler"),
    *("filelock", "h5py", "keras", "numpy", "rich", "tensorboard", "tensorflow"),
    *("IPython", "pandas", "prometheus_client", "simpy", "yaml"),  # where they are there
    *("crankshaft.engine", "crankshaft.input"),
}
MAY_IMPORT = {
    "engine": _OF_REPLICAS,
    "input": {
        *("crankshaft.engine.data.run_data", "crankshaft.engine.data.source", "crankshaft.engine.data.streamed"),
        *("crankshaft.engine.data.preprocessing", "crankshaft.engine.errors", "crankshaft.engine.logging"),
        *("crankshaft.engine.machine.files", "crankshaft.engine.machine.memory"),
        *("filelock", "numpy", "tensorflow"),
        *("array_record", "crc32c", "pyarrow", "tokenizers"),  # extras
    },
    "runner": _OF_HOSTS,
    "parts": _OF_HOSTS | {"crankshaft.runner"},
    "models": {"crankshaft.engine", "crankshaft.parts", "numpy", "tensorflow"},
    "launch": _OF_HOSTS | {"crankshaft.runner", "crankshaft.parts", "crankshaft.models"},
}

# What a run has only if it asks for it: a run that does not have a part neither loads nor needs it.
PARTS = {folder.name: (f"parts/{folder.name}/",) for folder in sorted((ROOT / "parts").iterdir()) if folder.is_dir()}
PARTS.pop("__pycache__", None)
PARTS["keras_models"] += OF_KERAS_MODELS

# The files of a part that run on the host alone: they import what a run is made of. The part's other files are the
# engine's, so to speak: they import no more than it may, and neither flags, environment, nor these files.
HOST_CODE = {
    **dict.fromkeys(("benchmark", "clusters", "dashboard", "elastic", "launchers", "plan"), "all"),
    "ask": ("answering", "command"),
    "memory_snapshots": ("run_snapshots", "task_memory"),
    "parameter_servers": ("evaluator", "servers"),
    "tables": ("exported_tables",),
    "workers": ("agreement",),
}

# What only the assembly of a run and its commands import, and no part.
COMPOSITION = "the composition of a run"
COMPOSERS = (
    *("launch/assembly", "launch/program"),
    *(f"launch/composition/{name}" for name in ("building", "devices", "hooks", "training")),
)

# The files that compose a run, and the parts that each imports within the `if` that says that the run has them.
# Everywhere else an object is passed in; in `launch` its type may be imported.
COMPOSING = {
    "launch/assembly.py": {"benchmark", "clusters", "dashboard", "parameter_servers", "plan"},
    "launch/composition/building.py": {"keras_models", "workers"},
    "launch/composition/devices.py": {"parameter_servers", "sharding", "workers"},
    "launch/composition/hooks.py": {"ask", "elastic", "keras_models", "memory_snapshots", "tables", "tensorboard"},
    "launch/composition/open_run.py": {"workers"},
    "launch/composition/training.py": {"clusters", "memory_snapshots"},
    "launch/program.py": {"clusters", "keras_models"},
    "launch/train.py": {"launchers"},
}

# What reads the command line or the environment: that of launch, of runner, and of parts' host code.
READERS = {
    "absl.app",
    "absl.flags",
    "argparse",
    "getopt",
    "optparse",
    "os.environ",
    "os.environb",
    "os.getenv",
    "os.getenvb",
    "sys.argv",
    "tensorflow.compat.v1.app",
    "tensorflow.compat.v1.flags",
}

# Names with an underscore that tests may use.
OPEN_TO_ALL = {
    *("_asdict", "_fields", "_replace"),  # a NamedTuple's, which are documented
    "_backend_apply_gradients",  # Keras's, which an optimizer of one's own overrides
    "_exit",  # os's
    # TensorFlow's, for which it has no other: strategies of one process would take each other's groups of devices.
    "_collective_key_base",
}


def is_within(name: str, allowed: set[str]) -> bool:
    """Whether the dotted `name` is one of `allowed` or lies inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def attributes(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Every attribute taken of an imported module, whatever it is called here: (line, name). Not where an item of it is
    set, which reads nothing."""
    modules = {}
    for _, name, bound in imports(tree, path):
        top = name.partition(".")[0]
        modules[bound] = top if bound == top else name
    nodes = list(ast.walk(tree))
    written = {id(node.value) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in written:
            first, _, rest = dotted(node).partition(".")
            if first in modules:
                yield node.lineno, f"{modules[first]}.{rest}"


def dotted(node: ast.expr) -> str:
    """The dotted name that an expression is, such as `a.b.c`; "" if it is another."""
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_host_code(path: Path) -> bool:
    """Whether a file, or a module with slashes for its dots, may import `runner` and read flags and environment."""
    if path.parts[0] != "parts":
        return path.parts[0] in {"launch", "runner"}
    files = HOST_CODE.get(path.parts[1] if len(path.parts) > 1 else "", ())
    return files == "all" or (len(path.parts) > 2 and path.parts[2].removesuffix(".py") in files)


def may_import(path: Path) -> set[str]:
    """The names that a file may import besides the standard library."""
    if path.parts[0] == "parts" and not is_host_code(path):
        return _OF_REPLICAS | {"crankshaft.engine", "crankshaft.parts"}
    return MAY_IMPORT[path.parts[0]] | {f"crankshaft.{path.parts[0]}"}


def import_faults(root: Path) -> list[str]:
    """One line for each import that its file may not make."""
    faults = []
    for path in source_files(root):
        if path.parts[0] not in MAY_IMPORT:
            continue
        allowed, tree = may_import(path), ast.parse((root / path).read_text(encoding="utf-8"))
        late = lines_of(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        for line, name, _ in imports(tree, path):
            is_standard = name.partition(".")[0] in sys.stdlib_module_names
            # The functions of Python's logging give the root logger a handler where it has none, as absl's do.
            is_root_logger = name == "logging" and path != Path("engine/logging.py")
            # A part's other code imports host code only late, where that is called.
            target = Path(name.removeprefix("crankshaft.").replace(".", "/"))
            is_of_host = target.parts[0] == "parts" and is_host_code(target) and not is_host_code(path)
            if is_root_logger or not (is_standard or is_within(name, allowed)) or (is_of_host and line not in late):
                faults.append(
                    f"{path}:{line} imports {name}; it may import the standard library, " + ", ".join(sorted(allowed))
                )
    return faults


def part_of(path: str) -> str | None:
    """The part that a file, or a module with slashes for its dots, belongs to; None for the core's."""
    found = [
        (len(place), part)
        for part, places in PARTS.items()
        for place in places
        if f"{path.removesuffix('.py')}/".startswith(f"{place.removesuffix('.py').rstrip('/')}/")
    ]
    return max(found)[1] if found else None


@functools.cache
def part_imports(root: Path) -> list[tuple[str, int, str, bool]]:
    """Every import of a part by the core: (path, line, part, whether it is within an `if` or a `case` of a function).

    And every import by a part of what composes a run. Without those for types.
    """
    found = []
    for path in source_files(root):
        if path.parts[0] not in {"engine", "launch", "parts", "runner"}:
            continue
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        branches = [node for function in functions for node in ast.walk(function) if hasattr(node, "body")]
        chosen = lines_of(node for node in branches if isinstance(node, (ast.If, ast.match_case)))
        typing = lines_of(
            node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        for line, name, _ in imports(tree, path):
            place = name.removeprefix("crankshaft.").replace(".", "/")
            part = part_of(place)
            if part_of(path.as_posix()):
                part = COMPOSITION if place.startswith(COMPOSERS) else None
            if part and line not in typing:
                found.append((path.as_posix(), line, part, line in chosen))
    return found


def lines_of(branches: Iterable) -> set[int]:
    """The lines of the bodies of some `if`s or `case`s."""
    bodies = [node.body + getattr(node, "orelse", []) for node in branches]
    return {line for body in bodies for line in range(body[0].lineno, body[-1].end_lineno + 1)}


def part_faults(root: Path) -> list[str]:
    """One line for each import of a part by a file that does not compose a run, or not where the run has it."""
    return [
        f"{path}:{line} imports {part}, which only a file that composes a run may, within the `if` that says that this "
        "run has it; pass it an object"
        for path, line, part, is_chosen in part_imports(root)
        if not (is_chosen and part in COMPOSING.get(path, ()))
    ]


def readings(tree: ast.Module, path: Path) -> set[tuple[int, str]]:
    """Where a file reads the command line or the environment: (line, name)."""
    found = {(line, name) for line, name, _ in imports(tree, path) if is_within(name, READERS)}
    return found | {(line, name) for line, name in attributes(tree, path) if name in READERS}


def reader_faults(root: Path) -> list[str]:
    """One line for each place outside host code that reads flags or the environment."""
    faults = []
    for path in source_files(root):
        if path.parts[0] not in MAY_IMPORT or is_host_code(path):
            continue
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        faults += [
            f"{path}:{line} reads {name}, which is host code's alone; take the value as an argument"
            for line, name in sorted(readings(tree, path))
        ]
    return faults


def privacy_faults(root: Path) -> list[str]:
    """One line for each place where a test looks at what is another's own: an attribute, or a name that is imported."""
    faults = []
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls"}:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not is_within(node.module, {"tests"}):
                names = [alias.name for alias in node.names]
            else:
                continue
            faults += [
                f"{path.relative_to(root)}:{node.lineno} looks at {name}, which is another's own; test what it does"
                for name in names
                if name.startswith("_") and not name.endswith("__") and name not in OPEN_TO_ALL
            ]
    return faults


def layout_faults(root: Path) -> list[str]:
    """One line for each place outside `RunDir` that names a file of a run, or joins a path to one of its folders."""
    home = Path("engine/checkpoints/run_dir.py")
    tree = ast.parse((ROOT / home).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_Inside"]
    names = {call.args[0].value for call in calls}
    assert {"config.json", "checkpoints", ".lock"} <= names
    faults = []
    for path in source_files(root):
        if path.parts[0] not in {"engine", "launch", "parts", "runner"} or path == home:
            continue
        nodes = [*ast.walk(ast.parse((root / path).read_text(encoding="utf-8")))]
        joined = [part for node in nodes if isinstance(node, ast.Call) and is_join(node) for part in node.args]
        files = [node for node in nodes if isinstance(node, ast.Constant) and "." in str(node.value)]
        for node in [*joined, *files]:
            if isinstance(node, ast.Constant) and node.value in names:
                faults.append(f"{path}:{node.lineno} has {node.value!r}; take the path from RunDir")
    return faults


def is_join(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in {"join", "joinpath", "Path"}


def plant(root: Path, path: str, source: str) -> Path:
    """Writes `source` to `path` in a tree of its own, and gives the tree's root."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(source, encoding="utf-8")
    return root


def test_walk_finds_every_room():
    assert {path.parts[0] for path in source_files(ROOT)} >= set(MAY_IMPORT)


RULES = {
    "imports point one way": import_faults,
    "only what composes a run imports parts": part_faults,
    "no arrow between files runs in a circle": lambda root: circles(arrows(root)),
    "no arrow between folders runs back up": lambda root: circles(between_folders(arrows(root))),
    "no arrow between floors runs back up": lambda root: circles(between_folders(arrows(root), depth=1)),
    "one file knows the layout of a run": layout_faults,
    "only host code reads flags and the environment": reader_faults,
    "tests look at nothing that is another's own": privacy_faults,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_kept(rule):
    faults = RULES[rule](ROOT)
    assert not faults, "\n".join(faults)


def test_each_entry_of_the_composing_files_is_needed():
    kept = {(path, part) for path, _, part, _ in part_imports(ROOT)}
    assert kept == {(path, part) for path, names in COMPOSING.items() for part in names}


def test_parts_are_of_files_that_exist():
    places = [place for part in PARTS.values() for place in part]
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_a_circle_is_found(tmp_path):
    plant(tmp_path, "engine/a.py", "from . import b\n")
    plant(tmp_path, "engine/b.py", "def late():\n    from .a import x\n")
    assert circles(arrows(tmp_path)) == ["engine/a.py imports engine/b.py", "engine/b.py imports engine/a.py"]


def test_an_arrow_back_up_is_found_though_no_file_is_in_a_circle(tmp_path):
    plant(tmp_path, "engine/a/one.py", "from ..b import two\n")
    plant(tmp_path, "engine/b/two.py", "")
    plant(tmp_path, "engine/b/three.py", "from ..a.one import x\n")
    assert circles(arrows(tmp_path)) == []
    assert circles(between_folders(arrows(tmp_path))) == ["engine/a imports engine/b", "engine/b imports engine/a"]


def test_the_drawing_and_the_rooms_lines_are_of_the_code_as_it_is():
    page = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    assert updated(page) == page, "run `python docs/layout.py`"


# (rule, path, source, the message about its last line).
PLANTED = [
    (
        import_faults,
        "engine/a.py",
        "def late():\n    import crankshaft.input.digits\n",
        "imports crankshaft.input.digits;",
    ),
    (
        import_faults,
        "engine/a.py",
        "import importlib\nimportlib.import_module('crankshaft.models')\n",
        "imports cranks",
    ),
    (import_faults, "engine/strategies/a.py", "from ...launch import flags\n", "imports crankshaft.launch.flags;"),
    (import_faults, "engine/a.py", "from absl import logging\n", "imports absl.logging;"),
    (import_faults, "runner/a.py", "from ..parts import tables\n", "imports crankshaft.parts.tables;"),
    (import_faults, "parts/tables/a.py", "from absl import flags\n", "imports absl.flags;"),
    (import_faults, "parts/tables/a.py", "from ..ask import command\n", "imports crankshaft.parts.ask.command;"),
    (import_faults, "input/a.py", "import logging\n", "imports logging;"),
    (part_faults, "engine/a.py", "def late():\n    if x:\n        from ..parts import tables\n", "imports tables,"),
    (
        part_faults,
        "launch/composition/devices.py",
        "from ...parts.parameter_servers import strategy\n",
        "imports parameter_ser",
    ),
    (
        part_faults,
        "parts/plan/a.py",
        "from ...launch.composition import building\n",
        "imports the composition of a run, w",
    ),
    (
        part_faults,
        "launch/a.py",
        "from ..parts.plan.cost import x\n",
        "imports plan, which only a file that composes",
    ),
    (reader_faults, "models/a.py", "import os as system\nsystem.getenv('HOME')\n", "reads os.getenv,"),
    (reader_faults, "engine/a.py", "import os\nos.environ['A'] = os.environ['B']\n", "reads os.environ,"),
    (reader_faults, "input/a.py", "from os import environ as e\n", "reads os.environ,"),
    (reader_faults, "parts/workers/a.py", "from os import environ as e\n", "reads os.environ,"),
    (privacy_faults, "tests/a.py", "def test(loop):\n    loop.programs._at[0].run()\n", "looks at _at, "),
    (privacy_faults, "tests/a.py", "from crankshaft.engine.loop import _due\n", "looks at _due, "),
    (layout_faults, "launch/a.py", "import os\npath = os.path.join(run_dir, 'best')\n", "has 'best'; take the path"),
]


@pytest.mark.parametrize(("rule", "path", "source", "said"), PLANTED)
def test_a_fault_is_found(tmp_path, rule, path, source, said):
    (fault,) = rule(plant(tmp_path, path, source))
    assert fault.startswith(f"{path}:{len(source.splitlines())} {said}")


def test_what_is_right_is_let_through(tmp_path):
    plant(tmp_path, "engine/strategies/a.py", "import os.path\nfrom .. import loop\nfrom ..loop import c\n")
    plant(tmp_path, "launch/a.py", "import os\nfrom absl import flags\nmark = 'best', os.environ['A']\n")
    plant(tmp_path, "tests/a.py", "class A:\n    def __init__(self):\n        self._b = a._replace()\n")
    assert [fault for rule in RULES.values() for fault in rule(tmp_path)] == []


@pytest.mark.holds("Data is parsed, never unpickled")
def test_nothing_is_unpickled_and_code_is_executed_only_of_the_users_files():
    """No file of data is: what makes objects of bytes is neither imported nor called."""
    executed = set()
    for path in source_files(ROOT):
        if path.parts[0] == "benchmarks":
            continue
        nodes = [*ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        unpickling = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
        assert not unpickling & {name.partition(".")[0] for name in names}, path
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        assert "allow_pickle" not in {word.arg for call in calls for word in call.keywords}, path
        if {"eval", "exec"} & {call.func.id for call in calls if isinstance(call.func, ast.Name)}:
            executed.add(path.as_posix())
    assert executed == {"parts/launchers/template.py", "runner/command_line/user_files.py"}
