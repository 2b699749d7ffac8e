"""Models and inputs, found by their module's name, and their arguments, read from the source.

The source is parsed, not imported: a wrong name or argument is found before TensorFlow has started.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ...engine.step import ranges
from ...engine.step.ranges import Interval
from ..errors import UsageError, nearest
from . import own_files
from .values import number

_BRACKETS = re.compile(r"\s*(?:\[(.*)\]|\((.*)\))\s*", re.DOTALL)  # around a list
_MODELS = "crankshaft.models."
_FROM_FLAGS = ("eval_data_dir", "validation_split")
_ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model or input, or an optimizer or schedule, with its arguments.

    Attributes:
      name: the module's.
      summary: the first line of its documentation.
      defaults: argument name -> default value.
      required: arguments without a default.
      fault: why its module can't be read, if it can't.
      has_tables: whether its module, or one of models/ that it imports, imports `engine.layers.embeddings`.
      intervals: the interval in which an argument has to lie, by name, where there is one.
      path: of a file of the user's own; None for a module that comes with Crankshaft.
      from_flags: of an input, those of its `load`'s keywords that flags of the same name fill.
    """

    name: str
    summary: str
    defaults: dict[str, Any]
    required: tuple[str, ...] = ()
    fault: str = ""
    has_tables: bool = False
    intervals: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    path: str | None = None
    from_flags: tuple[str, ...] = ()

    @property
    def reads_eval_data(self) -> bool:
        """Whether an input takes --eval_data_dir."""
        return "eval_data_dir" in self.from_flags


def models() -> dict[str, Entry]:
    """Finds the modules of models/ that have a class `Model`."""
    entries = _entries(_ROOT / "models", _model_arguments)
    return {name: dataclasses.replace(entry, intervals=ranges.MODEL_ARGUMENTS) for name, entry in entries.items()}


def inputs() -> dict[str, Entry]:
    """Finds the modules of input/ that have a function `load`."""
    return {name: _apart_from_flags(entry) for name, entry in _entries(_ROOT / "input", _load_arguments).items()}


def find(kind: str, name: str | None, entries: dict[str, Entry]) -> Entry:
    """Returns the entry of that name, or of the file at that path; raises `UsageError` if none is."""
    if name is None:
        raise UsageError(f"--{kind} is not given; use one of {', '.join(sorted(entries))}")
    if own_files.is_path(name):
        return of_file(kind, own_files.absolute(name))
    if name not in entries:
        raise UsageError(f"--{kind}={name} is unknown; {nearest(name, entries)}")
    if fault := entries[name].fault:
        raise UsageError(f"--{kind}={name} can't be read: {fault}; mend it")
    return entries[name]


def of_file(kind: str, path: str) -> Entry:
    """Makes the entry of a file of the user's own. Raises `UsageError` for one that is no model or input."""
    tree = own_files.parse(kind, path)
    arguments = (_model_arguments if kind == "model" else _load_arguments)(tree)
    if arguments is None:
        raise own_files.lacking(kind, path)
    if kind == "input" and len(arguments.args) < 2:
        raise own_files.lacking(kind, path, "a load without the arguments data_dir and seed")
    summary = (ast.get_docstring(tree) or "").split("\n")[0]
    has_tables = _has_tables(tree, _ROOT / "models")
    entry = Entry(own_files.name_of(path), summary, *_signature(arguments), has_tables=has_tables, path=path)
    return _apart_from_flags(entry) if kind == "input" else entry


def _apart_from_flags(entry: Entry) -> Entry:
    """Takes what flags of their own fill from an input's arguments."""
    defaults = {name: default for name, default in entry.defaults.items() if name not in _FROM_FLAGS}
    return dataclasses.replace(entry, defaults=defaults, from_flags=tuple(entry.defaults.keys() - defaults.keys()))


def of_class(trainer_class: type) -> Entry:
    """Makes the entry of a user's own Trainer."""
    constructor = vars(trainer_class).get("__init__") or trainer_class.__init__  # type: ignore[misc]
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if constructor.__qualname__.split(".")[0] == "Module":
        named = []  # tf.Module's own `name` is no argument of the model's
    return Entry(
        name=trainer_class.__name__,
        summary=(trainer_class.__doc__ or "").strip().split("\n")[0],
        defaults={p.name: p.default for p in named if p.default is not p.empty},
        required=tuple(p.name for p in named if p.default is p.empty),
    )


# The arguments of flags that name nothing else.
ENTRIES = {
    "outer_arg": Entry(
        "the step of local SGD",
        "",
        {"learning_rate": 0.7, "momentum": 0.9},
        intervals={"learning_rate": Interval(lower=0, upper=ranges.HUGE), "momentum": Interval(lower=0, below=1)},
    ),
    "early_stopping_arg": Entry(
        "early stopping", "", {"min_delta": 0.0}, intervals={"min_delta": Interval(lower=0, upper=ranges.HUGE)}
    ),
    "reduce_lr_arg": Entry(
        "the plateau",
        "",
        {"factor": 0.1, "min_delta": 1e-4},
        intervals={"factor": Interval(above=0, below=1), "min_delta": Interval(lower=0, upper=ranges.HUGE)},
    ),
}


def parse_arguments(flag: str, pairs: list[str], entry: Entry) -> dict[str, Any]:
    """Parses `NAME=VALUE` strings into values of the types of the entry's defaults."""
    values = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        known = {*entry.defaults, *entry.required}
        if not known:
            raise UsageError(f"--{flag} {pair}: {entry.name} takes no arguments; leave it out")
        if name not in known:
            raise UsageError(f"--{flag} {name}: {entry.name} has no such argument; {nearest(name, known)}")
        values[name] = parse_value(flag, name, text, entry.defaults.get(name))
        if fault := ranges.outside(entry.intervals, name, values[name]):
            raise UsageError(f"--{flag} {fault}; give {entry.name} one that is")
    if missing := [name for name in entry.required if name not in values]:
        raise UsageError(f"{entry.name} needs --{flag} {missing[0]}=VALUE")
    return values


def wrong_argument(values: dict[str, Any], entry: Entry) -> str | None:
    """Returns what is wrong with the names or types of arguments that were read from a file; None if nothing is.

    Values are as JSON has them, with lists for tuples; types are compared with the defaults'.
    """
    for name, value in values.items():
        if name not in {*entry.defaults, *entry.required}:
            return f"has {name!r}, and {entry.name} has no such argument"
        default = entry.defaults.get(name)
        if default is not None and value != default and not _is_like(value, default):
            return f"has {name}={value!r:.60}, which is unlike the default, {default}"
    if missing := [name for name in entry.required if name not in values]:
        return f"has no {missing[0]}, which {entry.name} needs"
    return None


def _is_like(value, default) -> bool:
    if isinstance(default, (tuple, list)):
        return isinstance(value, list) and (not default or all(_is_like(item, default[0]) for item in value))
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)


def parse_value(flag: str, name: str, text: str, default: Any) -> Any:
    """Parses text into a value of `default`'s type; guesses number, list or word where the default is None."""
    try:
        if isinstance(default, (tuple, list)):
            kind = type(default[0]) if default else None
            return tuple(_of_kind(kind, item) for item in _items(text))
        if not isinstance(default, (int, float, str)) and ("," in text or _BRACKETS.fullmatch(text)):
            return tuple(_of_kind(None, item) for item in _items(text))
        return _of_kind(type(default), text)
    except (KeyError, ValueError):
        name_of_kind = {bool: "boolean", int: "integer", float: "number"}.get(type(default), "such list")
        shown = ",".join(map(str, default)) if isinstance(default, (tuple, list)) else default
        hint = f"give a value like the default, {shown}" if shown or shown == 0 else "give one or more, or leave it out"
        raise UsageError(f"--{flag} {name}={text} is no {name_of_kind}; {hint}") from None


def _items(text: str) -> list[str]:
    """Returns a list's items, with commas between them, maybe in brackets. Raises ValueError where one is empty."""
    items = [item.strip() for item in _BRACKETS.sub(r"\1\2", text).split(",")]
    if not all(items):
        raise ValueError("an item is empty")
    return items


def _of_kind(kind: type | None, text: str) -> Any:
    """Converts text, by its looks where the kind is none that text has. Raises ValueError, of a boolean KeyError."""
    if kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
    if kind in (int, float):
        return number(text.strip(), kind is int)
    if kind is str:
        return text
    for whole in (True, False):
        with contextlib.suppress(ValueError):
            return number(text.strip(), whole)
    return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text.strip())


@functools.cache
def _entries(folder: pathlib.Path, arguments) -> Mapping[str, Entry]:
    """Reads a folder's sources, once a process."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            fault = f"{path.relative_to(_ROOT)}{line}: {getattr(error, 'msg', error)}"
            found[path.stem] = Entry(path.stem, f"(not readable: {fault})", {}, fault=fault)
            continue
        function = arguments(tree)
        if function is not None:
            summary = (ast.get_docstring(tree) or "").split("\n")[0]
            found[path.stem] = Entry(
                path.stem, summary, *_signature(function), has_tables=_has_tables(tree, path.parent)
            )
    return found


def _imported(node: ast.ImportFrom) -> str:
    """Names the module that a statement imports from, in full also where a module of models/ names it by its place."""
    return ("", _MODELS, "crankshaft.")[min(node.level, 2)] + (node.module or "")


def _has_tables(tree: ast.Module, folder: pathlib.Path) -> bool:
    names = [_imported(node) for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [each.name for node in tree.body if isinstance(node, ast.Import) for each in node.names]
    if any(name.startswith("crankshaft.engine.layers.embeddings") for name in names):
        return True
    paths = [folder / f"{name.removeprefix(_MODELS)}.py" for name in names if name.startswith(_MODELS)]
    return any(_has_tables(ast.parse(path.read_text(encoding="utf-8")), folder) for path in paths if path.is_file())


def _model_arguments(tree: ast.Module, name: str = "Model") -> ast.arguments | None:
    """Returns the arguments of a class's constructor, maybe a base's; None where there is no such class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return item.args
            bases = (_model_arguments(tree, base.id) for base in node.bases if isinstance(base, ast.Name))
            return next(filter(None, bases), None) or ast.arguments([], [ast.arg("self")], None, [], [], None, [])
        if not isinstance(node, ast.ImportFrom) or not _imported(node).startswith(_MODELS):
            continue
        for alias in node.names:
            path = _ROOT / "models" / f"{_imported(node).removeprefix(_MODELS)}.py"
            if (alias.asname or alias.name) == name and path.is_file():
                return _model_arguments(ast.parse(path.read_text(encoding="utf-8")), alias.name)
    return None


def _load_arguments(tree: ast.Module):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "load":
            return node.args
    return None


def _signature(args: ast.arguments) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns (defaults, required) of a model's constructor, or of an input's `load` after data_dir and seed."""
    first = 1 if args.args[:1] and args.args[0].arg == "self" else 2  # self, or data_dir and seed
    given: list[ast.expr | None] = [*[None] * (len(args.args) - len(args.defaults)), *args.defaults]
    pairs = list(zip(args.args, given, strict=True))[first:]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    defaults = {arg.arg: _literal(default) for arg, default in pairs if default is not None}
    return defaults, tuple(arg.arg for arg, default in pairs if default is None)


@functools.cache
def optimizers() -> Mapping[str, Entry]:
    """Finds the engine's optimizers and Keras's, by lower-case name; reads them once a process."""
    tree = ast.parse((_ROOT / "engine" / "optimizers" / "rules.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {}
    for key, value in _dictionary(tree, "_RULES").items():
        defaults = _without_flags(_constructor_defaults(value, classes))
        summary = ast.get_docstring(classes[value]).split("\n")[0]
        found[key] = Entry(key, summary, defaults, intervals=ranges.OPTIMIZER_ARGUMENTS)
    keras = importlib.util.find_spec("keras")
    folder = pathlib.Path(keras.origin).parent / "src" / "optimizers"
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name, node in classes.items():
            is_optimizer = any(isinstance(base, ast.Attribute) and base.attr == "Optimizer" for base in node.bases)
            defaults = _constructor_defaults(name, classes)
            if is_optimizer and name.lower() not in found and "learning_rate" in defaults:
                own = _without_flags(defaults)
                summary = f"tf.keras.optimizers.{name}"
                found[name.lower()] = Entry(name.lower(), summary, own, intervals=ranges.OPTIMIZER_ARGUMENTS)
    return found


def _without_flags(defaults: dict[str, Any]) -> dict[str, Any]:
    """Drops an optimizer's arguments that have their own flag, by which the engine does the same itself."""
    flags = (
        "learning_rate weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum ema_overwrite_frequency "
        "loss_scale_factor gradient_accumulation_steps name use_locking"
    ).split()
    return {name: default for name, default in defaults.items() if name not in flags}


def schedules() -> dict[str, Entry]:
    """Finds the engine's learning-rate schedules and their arguments."""
    tree = ast.parse((_ROOT / "engine" / "optimizers" / "schedules.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {}
    for key, value in _dictionary(tree, "_SCHEDULES").items():
        found[key] = Entry(key, "", _defaults(functions[value].args), intervals=ranges.SCHEDULE_ARGUMENTS)
    return found


def _dictionary(tree: ast.Module, name: str) -> dict[str, str]:
    """Returns a module's `name = {"key": Identifier, ...}`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            pairs: Any = node.value  # an `ast.Dict`
            return {key.value: value.id for key, value in zip(pairs.keys, pairs.values, strict=True)}
    raise LookupError(f"no {name} in the source")


def _constructor_defaults(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """Returns the arguments with defaults of a class's constructor, including its bases' in the same file."""
    node, defaults = classes[name], {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            defaults.update(_constructor_defaults(base.id, classes))
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            defaults.update(_defaults(item.args))
    return defaults


def _literal(node: ast.expr) -> Any:
    """Returns a default's value; None where it is no literal, so that the argument's value is guessed from its text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _defaults(args: ast.arguments) -> dict[str, Any]:
    named = args.args[len(args.args) - len(args.defaults) :]
    pairs = [*zip(named, args.defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return {arg.arg: _literal(default) for arg, default in pairs if default is not None}
