"""Turns flags given by name, in Python or in a file, into words of a command line. Nothing here starts TensorFlow.

All of a flag's values, whoever gives them, are thus parsed from text by the flag's own rule.
"""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from ..errors import UsageError
from . import own_files, paths, rules
from .flags import ARGUMENTS, GROUPS, HELP, USES, in_place_of

# Flags in a run's config.json that belong to the call that wrote it, and not to the run.
_OF_THAT_CALL = "mode run_dir result_json output allow_changed_config config flagfile".split()
_OF_THAT_CALL += [*GROUPS["Generation"], *GROUPS["Benchmark mode"]]
_OF_A_FOLDER = [name for name, use in USES.items() if use == ("run_dir",)]
_MOST_FLAGFILES = 100


def words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields `--NAME=VALUE` for each value; None is a flag that is not given.

    Args:
      values: by flag: numbers, text, booleans, paths; lists, of a flag that takes several values; and dictionaries for
        `model_arg` and its like, whose values may be lists too.

    Raises:
      UsageError: a value of another kind, such as a list where one value is meant.
    """
    for name, value in values.items():
        if value is None:
            continue
        if name not in flags.FLAGS:
            yield f"--{name}="  # which is said to be unknown as it is parsed
        elif isinstance(value, Mapping) and name in ARGUMENTS:
            yield from (f"--{name}={each}={_argument(f'{name} {each}', given)}" for each, given in value.items())
        elif isinstance(value, (list, tuple)) and isinstance(flags.FLAGS[name], flags.MultiFlag):
            yield from (f"--{name}={_text(name, each)}" for each in value)
        elif isinstance(value, (list, tuple)) and isinstance(flags.FLAGS[name].parser, _OF_SEVERAL):
            yield f"--{name}={_joined(name, value)}"
        else:
            yield f"--{name}={_text(name, value)}"


_OF_SEVERAL = (rules.Files, flags.BaseListParser)  # parsers of values with commas between them


def expanded(arguments: Sequence[str]) -> list[str]:
    """Returns a command line's words, of its --flagfile too, after those of each --config, so that the former win.

    Raises:
      UsageError: a file can't be read, or is not a mapping of flags; an argument is given twice in one place.
    """
    arguments = without_flagfiles(arguments)
    return [*(word for _, its in files(arguments) for word in its), *arguments]


def files(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns (path, its flags as words) of each file that `--config=FILE` names. Raises as `expanded` does.

    A later file, and the command line, replaces a length also where it says it in another way.
    """
    _check_once("", arguments)
    contents, names = [], _names(arguments)
    for path in _values(arguments, "config"):
        contents.append((path, list(words(_read(path, names)))))
        _check_once(f"--config={path}: ", contents[-1][1])
    for index, (path, its) in reversed([*enumerate(contents)]):
        contents[index] = path, _without(in_place_of(names), its)
        names |= _names(its)
    return contents


def _names(arguments: Sequence[str]) -> set[str]:
    """Returns the names of the flags that words give."""
    return {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}


def _without(names: set[str], arguments: Sequence[str]) -> list[str]:
    """Returns words less those that give flags of these names."""
    return [word for word in arguments if names.isdisjoint(_names([word]))]


def without_flagfiles(arguments: Sequence[str]) -> list[str]:
    """Returns words with the lines of the files that `--flagfile=FILE` names in its place, as absl has them.

    A length in such a file is left out where the command line says it in another way.
    """
    left, read, opened = list(arguments), [], 0
    replaced = in_place_of(_names(arguments))
    while left:
        word = left.pop(0)
        if word in ("--flagfile", "-flagfile"):
            path = left.pop(0) if left else ""
        elif word.startswith(("--flagfile=", "-flagfile=")):
            path = word.partition("=")[2]
        else:
            read.append(word)
            continue
        opened += 1
        if opened > _MOST_FLAGFILES:
            raise UsageError(f"--flagfile={path} is the {opened}th to be read; files that name one another have no end")
        text = paths.read_text("flagfile", path, "give a file of flags, one a line")
        lines = (line.strip() for line in text.splitlines())
        left[:0] = _without(replaced, [line for line in lines if line and not line.startswith(("#", "//"))])
    return read


def _values(arguments: Sequence[str], name: str) -> list[str]:
    """Returns the values that a command line gives a flag, in order."""
    texts = []
    for index, word in enumerate(arguments):
        flag, separator, value = word.lstrip("-").partition("=")
        if flag == name and word.startswith("-"):
            texts.append(value if separator else "".join(arguments[index + 1 : index + 2]))
    return texts


def _check_once(where: str, arguments: Sequence[str]) -> None:
    """Raises `UsageError` where one place gives an argument twice, of which one would count."""
    for flag in ARGUMENTS:
        values: dict[str, str] = {}
        for name, _, value in (pair.partition("=") for pair in _values(arguments, flag)):
            if name in values:
                raise UsageError(f"{where}--{flag} {name} is given twice, {values[name]} and {value}; leave one out")
            values[name] = value


def _read(path: str, names: Collection[str]) -> dict[str, Any]:
    """Reads flags by name from a YAML file, a JSON file, or the config.json that a run has left.

    Numbers are text, as they were written. A run's flags that are for a run_dir are left out unless it is among the
    `names` that the caller gives.
    """
    text = paths.read_text("config", path, "give a YAML or JSON file of flags")
    try:
        values = _from_json(text) if path.endswith(".json") else _from_yaml(path, text)
        if isinstance(values, dict) and {"flags", "deciding"} <= set(values):
            of_run = _mapping("flags", values["flags"])
            own_files.refuse_of_file(f"--config={path}", of_run, names)
            script = _mapping("script_flags", _mapping("deciding", values["deciding"]).get("script_flags", {}))
            of_run = {name: value for name, value in script.items() if name not in HELP} | of_run
            left_out = {*_OF_THAT_CALL, *(() if "run_dir" in names else _OF_A_FOLDER)}
            return {name: value for name, value in of_run.items() if name not in left_out}
    except RecursionError:
        raise UsageError(f"--config={path} is not readable as such (it is nested too deep); mend it") from None
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--config={path} is not readable as such ({' '.join(str(error).split())}); mend it") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config={path} is not a mapping of flags; write lines such as learning_rate: 0.01")
    return values


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its {name} is not an object")
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the dictionary of these pairs. Raises ValueError where a name comes twice."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"{name} is given twice")
        unique[name] = value
    return unique


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once, parse_int=str, parse_float=str, parse_constant=str)


def _from_yaml(path: str, text: str) -> Any:
    """Reads YAML as text, but for null: which word is a number, and which is true, the flag's rule says."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--config={path} needs PyYAML: pip install crankshaft[yaml], or give a .json") from None

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):  # a few of these are a file of any size
                raise ValueError(f"*{self.peek_event().anchor} repeats another part; write it out")
            return super().compose_node(parent, index)

    def plain(node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return _once([(str(plain(name)), plain(value)) for name, value in node.value])
        if isinstance(node, yaml.SequenceNode):
            return [plain(each) for each in node.value]
        return None if node.style is None and node.value in ("", "~", "null", "Null", "NULL") else node.value

    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    return node and plain(node)


def _argument(name: str, value: Any) -> str:
    """Returns the text of an argument of `model_arg` or its like, in which a list has brackets."""
    return f"[{_joined(name, value)}]" if isinstance(value, (list, tuple)) else _text(name, value, may_be_none=True)


def _joined(name: str, values: Sequence) -> str:
    texts = [_text(name, value) for value in values]
    if wrong := next((text for text in texts if "," in text), None):
        raise UsageError(f"--{name}: {wrong} has a comma in it, which stands between two values; use another name")
    return ",".join(texts)


def _text(name: str, value: Any, may_be_none: bool = False) -> str:
    """Returns one value as text. Raises `UsageError` for what is not a single value."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy's
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, numbers.Real)) or (value is None and may_be_none):
        return str(value)
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    wants = rules.wanted(flags.FLAGS[name]) if name in flags.FLAGS else None
    raise UsageError(f"--{name}={value!r:.60} is a {type(value).__name__}, and not one value; give {wants or 'one'}")
