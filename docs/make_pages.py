"""Writes flags.md, the lists of keys in events.md and benchmark.md, and `__init__.pyi`: `python docs/make_pages.py`.

They are made from the flags, models and inputs, from the schemas, and from signatures. With a FOLDER as its argument
they go there instead.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence

import crankshaft
from crankshaft.engine.record import events
from crankshaft.launch import fit, prepare
from crankshaft.launch.composition import open_run
from crankshaft.parts.ask import command as ask
from crankshaft.parts.benchmark import result
from crankshaft.parts.dashboard import report, server
from crankshaft.parts.launchers import local
from crankshaft.parts.plan import main as plan
from crankshaft.runner import base
from crankshaft.runner.command_line import help, registry, rules
from crankshaft.runner.command_line.flags import FIELDS, GROUPS
from crankshaft.runner.command_line.rules import default_value, fields
from crankshaft.runner.command_line.user_files import Module

PAGES = pathlib.Path(__file__).parent
_MADE = re.compile(r"(<!-- made of .* -->\n).*(<!-- end -->\n)", re.DOTALL)

_INTRODUCTION = """# Flags

`crankshaft train --help` prints this list, `--helpshort` the flags that most runs use. In Python, `crankshaft.run`
takes flags as keywords. Values are checked before TensorFlow starts. A flag that would have no effect is an error,
which names [the line to write](model.md#a-flag-that-has-no-effect). `--nodebug` is `--debug=false`.

Flags may be in a file: `--flagfile=run.flags`, one per line, or `--config=run.yaml` (`pip install PyYAML`; JSON without
it), also a run's own `config.json`, with another `--run_dir`. The command line takes precedence over `--config`, and
over a flagfile before it:

```yaml
model: mlp
model_arg: {hidden_units: [128, 64], dropout: 0.1}
input: digits
learning_rate: 0.01
train_epochs: 5
```

Text and paths are UTF-8 (in a locale with another encoding, set `PYTHONUTF8=1`).
"""
_LOCAL = "These stand before the `--` of `crankshaft local`; after it the flags above, or a script and its flags."


def pages() -> dict[str, str]:
    """Returns the text of each page, by its name."""
    kinds = [
        [f"`{kind}`", "<br>".join(f"`{name}`: {key.description}" for name, key in keys.items())]
        for kind, keys in events.SCHEMA.items()
    ]
    keys = "".join(f"- `{name}`: {key.description}\n" for name, key in result.KEYS.items())
    return {
        "flags.md": _flags(),
        "events.md": _with_part("events.md", _table(kinds, ("`event`", "its keys"))),
        "benchmark.md": _with_part("benchmark.md", keys),
        "__init__.pyi": Stub().text(),
    }


def _with_part(page: str, text: str) -> str:
    return _MADE.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", (PAGES / page).read_text(encoding="utf-8"))


def _flags() -> str:
    parts = [_INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n\n{_list([FIELDS[name] for name in names])}")
    for kind in registry.NAMES:
        heading = f"## {kind.capitalize()}s\n\n`--{kind}=NAME`, with `--{kind}_arg=ARGUMENT=VALUE`"
        parts.append(f"{heading}:\n\n{_entries(kind)}")
    parts.append(f"## crankshaft local\n\n{_LOCAL}\n\n{_command(local.LocalFlags)}")
    for name, command in (
        ("plan", plan.PlanFlags),
        ("prepare", prepare.PrepareFlags),
        ("monitor", server.DashboardFlags),
        ("report", report.ReportFlags),
        ("ask", ask.AskFlags),
    ):
        parts.append(f"## crankshaft {name}\n\n{_command(command)}")
    return "\n".join(parts)


def _command(command: type) -> str:
    return _list(fields(command).values())


def _list(flags: Iterable[dataclasses.Field]) -> str:
    """Lists flags with what they take, and their defaults."""
    lines = []
    for field in flags:
        info, default = field.metadata["info"], default_value(field)
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        takes = re.sub(r"(?:of (\S+) or more|from (\S+) to 2147483647)", r"≥ \1\2", info.kind.expected)
        takes = re.sub("^(an? |true or false$)", "", takes)
        described = "; ".join(filter(None, [takes, default not in (None, "", [], {}) and f"`{shown}`"]))
        lines.append(f"- `--{field.name}` ({described}): {info.help}\n")
    return "".join(lines)


def _entries(kind: str) -> str:
    rows = []
    for name in registry.NAMES[kind]:
        entry = registry.find(kind, name)
        arguments = [f"`{key}={help.as_typed(value)}`" for key, value in entry.defaults.items()]
        rows.append([f"`{name}`", entry.summary, "<br>".join([*(f"`{key}`" for key in entry.required), *arguments])])
    return _table(rows, ("name", "what it is", "arguments, with their defaults"))


def _table(rows: list[list[str]], heads: Sequence[str]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_PATH = "str | PathLike[str]"
_INTEGER = "int | np.integer[Any]"
_NUMBER = "float | np.floating[Any] | np.integer[Any]"
# What a flag takes in Python, by the type of its values; the first class that fits. Numbers as text are left out: a
# checker then finds a word in the place of a number.
_TAKES = (
    (rules.Argument, "Mapping[str, Any] | Sequence[str] | str"),
    (rules.Boolean, "bool | Literal[0, 1] | np.bool_"),
    (rules.Integer, _INTEGER),
    (rules.AutoOrNumber, f"{_NUMBER} | Literal['auto']"),
    (rules.Number, _NUMBER),
    (rules.FilePaths, f"{_PATH} | Sequence[{_PATH}]"),
    (Module, _PATH),
    (rules.Text, f"{_PATH} | {_INTEGER}"),
    (rules.ValueType, _PATH),
)
_WITH_FLAGS = ("run", "open_run", "fit")
# What returns the program's own class, or a run of it.
_GENERIC = {**dict.fromkeys(("run", "open_run", "__enter__"), "Run[_Trainer]"), "trainer": "_Trainer"}


class Stub:
    """The package's stub: its names, flags as parameters with their help, and what a run documents."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._imports = {
            "collections.abc": {"Mapping", "Sequence"},
            "os": {"PathLike"},
            "typing": {"Any", "Generic", "Literal"},
        }

    def text(self) -> str:
        homes = crankshaft._HOMES
        for name in _WITH_FLAGS:
            self._add_with_flags(homes[name], name)
        self._lines += ["class Run(Generic[_Trainer]):", _docstring(inspect.getdoc(open_run.Run))]
        for module, name in ((base.__name__, "BaseRun"), (homes["Run"], "Run")):
            self._add_members(module, name)
        for name in homes.keys() - {*_WITH_FLAGS, "Run"}:
            names = self._imports.setdefault(homes[name].removeprefix("crankshaft"), set())
            names -= {name}
            names |= {f"{name} as {name}"}
        imports = [
            f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self._imports.items())
        ]
        return "\n".join(
            [
                "# Made by docs/make_pages.py, for type checkers and editors.",
                "import numpy as np",
                "import tensorflow as tf",
                *imports,
                "from typing_extensions import TypeVar",
                "\n_Trainer = TypeVar('_Trainer', bound=Trainer, default=Any)",
                f"\n__all__ = {crankshaft.__all__}\n",
                *self._lines,
                "",
            ]
        )

    def _add_with_flags(self, module: str, name: str) -> None:
        tree = _tree(module)
        (function,) = _named(tree, {name})
        arguments = function.args
        others = {*(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs))}
        others |= {*fit._ARGUMENTS} if name == "fit" else set()
        taken = [field for field in FIELDS.values() if field.name not in others]
        arguments.kwarg = None
        for field in taken:
            info = field.metadata["info"]
            takes = next(text for kind, text in _TAKES if isinstance(info.kind, kind))
            takes += f" | Sequence[{takes}]" * info.several
            arguments.kwonlyargs.append(ast.arg(field.name, _expression(f"{takes} | None")))
            arguments.kw_defaults.append(_expression(repr(default_value(field))))
        entries = [textwrap.fill(f"{field.name}: {field.metadata['info'].help}", 114) for field in taken]
        entries = [f"  {entry}\n".replace("\n", "\n    ").rstrip(" ") for entry in entries]
        text = f"{ast.get_docstring(function)}\n"
        text = re.sub(r"^  \*\*.*\n(?:    .*\n)*", lambda _: "".join(entries), text, flags=re.M)
        if name in _GENERIC:
            function.returns = _expression(_GENERIC[name])
        self._add_function(function, text, module, tree, "")

    def _add_members(self, module: str, name: str) -> None:
        tree = _tree(module)
        (of,) = _named(tree, {name})
        for node in _named(of, {*open_run.SHOWN, "__enter__", "__exit__"}):
            if isinstance(node, ast.AnnAssign):
                self._lines.append(f"    {node.target.id}: {self._annotation(node.annotation, module, tree)}")
                continue
            if node.name in _GENERIC:
                node.returns = _expression(_GENERIC[node.name])
            decorators = [ast.unparse(decorator).replace("functools.cached_", "") for decorator in node.decorator_list]
            self._lines += [f"    @{each}" for each in decorators if each != "explanations.explained"]
            self._add_function(node, ast.get_docstring(node), module, tree, "    ")

    def _add_function(
        self, node: ast.FunctionDef, text: str | None, module: str, tree: ast.Module, indent: str
    ) -> None:
        first = [None] * (len(node.args.args) - len(node.args.defaults))
        parameters = [[*zip(node.args.args, first + node.args.defaults, strict=True)]]
        parameters += [[*zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]]
        written = [
            [
                argument.arg
                + (f": {self._annotation(argument.annotation, module, tree)}" if argument.annotation else "")
                + (f" = {ast.unparse(default)}" if default else "")
                for argument, default in group
            ]
            for group in parameters
        ]
        given = [*written[0], *(["*", *written[1]] if written[1] else [])]
        lines = "".join(f"\n    {each}," for each in given) + "\n" if len(given) > 8 else ", ".join(given)
        returned = self._annotation(node.returns, module, tree)
        body = _docstring(text) if text else "    ..."
        self._lines.append(textwrap.indent(f"def {node.name}({lines}) -> {returned}:\n{body}", indent))

    def _annotation(self, node: ast.expr, module: str, tree: ast.Module) -> str:
        """Writes an annotation, and imports its names from where its module has them."""
        text = ast.unparse(node).replace("api.Run", "Run").replace("type[Trainer]", "type[_Trainer]")
        used = {name.id for name in ast.walk(ast.parse(text)) if isinstance(name, ast.Name)} - {"Run"}
        for found in ast.walk(tree):
            for alias in found.names if isinstance(found, ast.ImportFrom) else ():
                if alias.name in used:
                    folders = module.split(".")[1 : -found.level]
                    home = ".".join(["", *folders, found.module]) if found.level else found.module
                    self._imports.setdefault(home, set()).add(alias.name)
        return text


def _tree(module: str) -> ast.Module:
    return ast.parse(pathlib.Path(sys.modules[module].__file__).read_text(encoding="utf-8"))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _named(tree: ast.Module | ast.ClassDef, names: set[str]) -> list:
    """Lists the definitions in a module or class that have one of these names."""
    return [node for node in tree.body if (getattr(node, "name", None) or ast.unparse(node).split(":")[0]) in names]


def _docstring(text: str) -> str:
    text = text.strip()
    end = "\n" if "\n" in text else ""
    return textwrap.indent(f'"""{text}{end}"""', "    ")


if __name__ == "__main__":
    for page, text in pages().items():
        home = PAGES.parent if page == "__init__.pyi" else PAGES
        pathlib.Path(sys.argv[1] if sys.argv[1:] else home, page).write_text(text, encoding="utf-8")
