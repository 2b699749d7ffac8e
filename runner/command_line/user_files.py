"""Code of the user's own that flags name: a file by its path, or a module of an installed package."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from types import CodeType, ModuleType
from typing import Any, TypeGuard

from ...engine.own_code import note_file
from ..failures import UsageError
from . import paths, rules

# What `main` does instead of running, with (values of train's flags, trainer class, data); it returns the exit code.
instead: ContextVar[Callable[[dict[str, Any], Any, Any], int] | None] = ContextVar("instead", default=None)
# What such a file or module has; these are all flags that may name code.
NEEDED = {"model": "class Model", "input": "function load", "optimizer": "class Optimizer"}
_FIX = "give the path of a Python file, or a name without .py and without folders for what comes with Crankshaft"
_FIXES = {
    "model": "write class Model(crankshaft.Trainer), or def model() that returns a compiled Keras model",
    "input": "write def load(data_dir, seed), which returns (train, eval)",
    "optimizer": "write a subclass of crankshaft.engine.optimizers.Optimizer, or of Keras's",
}
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class Module(rules.Text):
    """The name of a model or an input, or the path of a file, which becomes one from the root."""

    def __init__(self):
        super().__init__("a name, or the path of a file")

    def coerce(self, value: Any) -> str:
        """See `rules.ValueType`. A later call in another folder finds the file too."""
        name = super().coerce(value)
        return rules.absolute(name) if is_path(name) else name


def is_path(name: str | None) -> TypeGuard[str]:
    """Returns whether a flag gives a file rather than the name of a module that comes with Crankshaft."""
    return isinstance(name, str) and (name.endswith(".py") or os.sep in name)  # a damaged configuration has anything


def is_own(name: str | None) -> TypeGuard[str]:
    """Returns whether a flag gives code that does not come with Crankshaft: a file, or package.module[:Name]."""
    return is_path(name) or (isinstance(name, str) and ("." in name or ":" in name))


def whole_name(kind: str, name: str) -> str:
    """Returns package.module:Name, with the default of Name; other names unchanged. Raises `UsageError`."""
    if is_path(name) or not is_own(name):
        return name
    whole = name if ":" in name else f"{name}:{NEEDED[kind].split()[-1]}"
    if not _MODULE.fullmatch(whole):
        raise UsageError(f"{kind}={name} is neither package.module nor package.module:Name; write one of them")
    return whole


def load_module(kind: str, name: str) -> tuple[ModuleType, str]:
    """Imports a module of an installed package; returns it, and the name of what it has. Raises `UsageError`."""
    path, _, attribute = whole_name(kind, name).partition(":")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):  # one that it imports is missing
            raise
        raise UsageError(f"{kind}={name}: there is no module {error.name}; install its package, or {_FIX}") from None


def refuse_unnamed_code(
    source: str, values: Mapping[str, Any], given_names: Collection[str] = (), fix: str = ""
) -> None:
    """Raises `UsageError` where a run's file, which may be anyone's, names code that the caller has not named.

    Args:
      values: values of flags by name, as read from the file, each in its flag's type.
      fix: how to name them without flags, for messages.
    """
    for kind in NEEDED:
        if kind not in given_names and is_own(path := values.get(kind)):
            raise UsageError(
                f"{source} names {path}, which does not run on that file's word alone; give {fix or f'{kind}={path}'}"
            )


def portable_name(name: str | None) -> str | None:
    """Names a model or input: a file by its name, without its folder, which may differ between hosts."""
    return os.path.basename(name) if is_path(name) else name


def compile_file(kind: str, path: str) -> CodeType:
    """Compiles the file's source. Raises `UsageError` if it does not exist, can't be read, or is not Python.

    Args:
      kind: the flag, model or input.
      path: path of the file, from the root.
    """
    source = paths.read(kind, path, _FIX)
    try:
        return compile(source, path, "exec")
    except SyntaxError as error:
        raise UsageError(f"{kind}={path} is not Python ({error.msg}, line {error.lineno}); mend it") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null characters, no text, brackets of any depth
        raise UsageError(f"{kind}={path} is not Python ({error}); mend it") from None


def missing_error(kind: str, path: str | None, fault: str = "") -> UsageError:
    """Makes the error that a file has no `Model` or `load`, or one that can't be used."""
    return UsageError(f"{kind}={path} has {fault or f'no {NEEDED[kind]}'}; {_FIXES[kind]}")


def run_file(kind: str, path: str) -> ModuleType:
    """Runs the file of --model or --input, again where another run has used it, as a script would.

    Its folder joins the end of the search path, so that a file may import those beside it.
    """
    code = compile_file(kind, path)
    note_file(path)
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    # Files of one name in two folders are two modules.
    name = f"{os.path.basename(path).removesuffix('.py')}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    module = sys.modules[name] = ModuleType(name)  # for dataclasses and pickle
    module.__file__ = path
    exec(code, module.__dict__)
    return module


def check_trainer(trainer_class) -> None:
    """Raises `UsageError` if a program passes something other than a Trainer's class to train; None takes --model's."""
    engine = sys.modules.get("crankshaft.engine.trainer")  # which a Trainer's class has imported
    kind = trainer_class if isinstance(trainer_class, type) else type(trainer_class)
    is_trainer = engine is not None and issubclass(kind, engine.Trainer)
    if trainer_class is None or (is_trainer and kind is trainer_class):
        return
    fix = "give a subclass of crankshaft.Trainer, whose build_model returns the Keras model"
    if is_trainer:
        fix = f"give the class itself, {kind.__name__}, and its arguments as model_arg"
    kind_name = "the class" if kind is trainer_class else "an object of"
    raise UsageError(f"the trainer_class is {kind_name} {kind.__name__}; {fix}")
