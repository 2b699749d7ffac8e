"""Turns flags given by name, in Python or in a file, into words of a command line. Nothing here starts TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from ..errors import UsageError
from .flags import GROUPS, USES

_CONFIG = "config"
# Flags in a run's config.json that belong to the call that wrote it, and not to the run.
_OF_THAT_CALL = "mode run_dir result_json export_dir allow_changed_config config".split()
_OF_THAT_CALL += [*GROUPS["Generation"], *GROUPS["Benchmark mode"]]
_OF_A_FOLDER = [name for name, use in USES.items() if use == ("run_dir",)]


def words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields `--NAME=VALUE` for each value; None is a flag that is not given.

    Args:
      values: by flag: numbers, text, booleans, paths; lists, whose items are given one by one if the flag may be
        repeated; and dictionaries for `model_arg` and its like.
    """
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            yield from (f"--{name}={argument}={_text(given)}" for argument, given in value.items())
        elif isinstance(value, (list, tuple)) and name in flags.FLAGS and _is_repeated(name):
            yield from (f"--{name}={_text(each)}" for each in value)
        else:
            yield f"--{name}={_text(value)}"


def expanded(arguments: list[str]) -> list[str]:
    """Returns a command line's words after those of the files that `--config=FILE` names, so that the former win.

    Raises:
      UsageError: a file can't be read, or is no mapping of flags.
    """
    return [*(word for _, its in files(arguments) for word in its), *arguments]


def files(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields (path, its flags as words) of each file that `--config=FILE` names. Raises as `expanded` does."""
    has_folder = any(word.lstrip("-").partition("=")[0] == "run_dir" for word in arguments if word.startswith("-"))
    for index, word in enumerate(arguments):
        name, separator, path = word.lstrip("-").partition("=")
        if name == _CONFIG and word.startswith("-"):
            if not separator:
                path = arguments[index + 1] if index + 1 < len(arguments) else ""
            yield path, list(words(_read(path, has_folder)))


def _read(path: str, has_folder: bool) -> dict[str, Any]:
    """Reads flags by name from a YAML file, a JSON file, or the config.json that a run has left.

    A run's flags that are for a run_dir are left out unless there is one again.
    """
    if not path:
        raise UsageError("--config is empty; give a YAML or JSON file of flags")
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read()
        values = json.loads(text) if path.endswith(".json") else _from_yaml(path, text)
    except OSError as error:
        raise UsageError(f"--config={path} can't be read ({error.strerror}); give a YAML or JSON file") from None
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--config={path} is not readable as such ({' '.join(str(error).split())}); mend it") from None
    if isinstance(values, dict) and {"flags", "deciding"} <= set(values):
        script = values["deciding"].get("script_flags", {})
        left_out = {*_OF_THAT_CALL, *(() if has_folder else _OF_A_FOLDER)}
        return {name: value for name, value in values["flags"].items() if name not in left_out} | script
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"--config={path} is no mapping of flags; write lines such as learning_rate: 0.01")
    return values


def _from_yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--config={path} needs PyYAML: pip install crankshaft[yaml], or give a .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _is_repeated(name: str) -> bool:
    return isinstance(flags.FLAGS[name], flags.MultiFlag)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    with contextlib.suppress(TypeError):
        return os.fspath(value)
    return str(value)
