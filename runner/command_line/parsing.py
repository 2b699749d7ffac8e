"""From a command line, keywords in Python, and files to flags' values by name, each in its type.

absl splits a command line into flags and their texts, which `rules` converts; a script's own flags are absl's. Nothing
here starts TensorFlow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import flags

from ...engine import logging
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.errors import importing
from ..failures import UsageError, nearest
from . import paths, saved_config
from .flags import ARGUMENTS, FIELDS, USES, Flags, replaced_by
from .rules import UntypedText, coerce
from .values import short

_RUN_DIR_FLAGS = [name for name, use in USES.items() if use == ("run_dir",)]
_MOST_FLAGFILES = 100
Values = dict[str, Any]


def script_flag_names() -> list[str]:
    """Lists the names of flags that a user's script, or a module of theirs, has defined."""
    modules = flags.FLAGS.flags_by_module_dict()
    theirs = [name for name in modules if name.split(".")[0] not in ("absl", "crankshaft", "tensorflow", "keras")]
    return [flag.name for name in theirs for flag in modules[name]]


def from_argv(argv: Sequence[str]) -> Values:
    """Reads the values that a command line gives, with its --flagfile and --config; sets a script's own flags.

    Raises `UsageError`.
    """
    words = without_flagfiles(argv[1:])
    _refuse_clashes()  # before a file is read that may be meant for the script's flag
    files = _load_config_files(words)
    for _, script_values in files:
        for name, value in script_values.items():
            flags.FLAGS[name].parse(value)
    given, rest = parse_words(words, FIELDS, script_flags=flags.FLAGS)
    if rest:
        raise UsageError(f"{rest[0]!r} is not a flag; write --NAME=VALUE, see --help")
    return _merged([*(values for values, _ in files), given])


def train_flags(words: Sequence[str]) -> Values:
    """Reads the values that words of a command line give flags of crankshaft train; a script may have others too.

    Raises `UsageError` for a mistake in those of crankshaft train.
    """
    words = without_flagfiles(words)
    given, _ = parse_words(words, FIELDS, known_only=True, between=True)
    return _merged([*(values for values, _ in _load_config_files(words, known_only=True)), given])


def from_keywords(keywords: Mapping[str, Any], arguments: Sequence[str] = ()) -> tuple[Values, Values]:
    """Reads the values that keywords give, with those of their `config`; and those of a script's own flags.

    None leaves a flag at its default; `arguments` are the names of the call's others. Raises `UsageError`.
    """
    given, script_values = _typed({name: _built_in(value) for name, value in keywords.items()}, arguments)
    if "config" not in given:
        return given, script_values
    in_file, script_values_in_file = _load_config_file(given["config"], given)
    return _merged([in_file, given]), script_values_in_file | script_values


def _built_in(value: Any) -> Any:
    """Converts other mappings and sequences, as of a library for configurations, to dictionaries and lists."""
    if type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, dict)):
        return {name: _built_in(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_built_in, value))
    is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, list, tuple))
    return [*map(_built_in, value)] if is_sequence else value


def parse_words(
    words: Sequence[str],
    fields: Mapping[str, Any],
    *,
    script_flags: flags.FlagValues | None = None,
    known_only: bool = False,
    between: bool = False,
) -> tuple[Values, list[str]]:
    """Reads the values that words of a command line give the flags of some fields, and the words that are not flags.

    Args:
      fields: dataclass fields of the flags, by name.
      script_flags: flags of a script, which are set from the words.
      known_only: whether flags that are unknown count as words.
      between: whether flags may follow other words.

    Raises:
      UsageError: a flag is unknown, or does not take its value.
    """
    absl = flags.FlagValues()
    for name, field in fields.items():
        is_boolean = isinstance(field.default, bool)
        absl[name] = flags.MultiFlag(flags.ArgumentParser(), None, name, None, "", boolean=is_boolean)
    if script_flags is not None:
        absl.append_flag_values(script_flags)
        script_flags.mark_as_parsed()
    absl.set_gnu_getopt(between)
    try:
        rest = absl(["", *words], known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        config, dot, part = error.flagname.partition(".")
        if dot and script_flags is not None and config in script_flags:
            raise UsageError(
                f"{error.flagname} is unknown: the command line sets no values within the script's own {config}; set "
                f"{part} in the file of {config}, or define a flag for it"
            ) from None
        raise _unknown(error.flagname, [*fields, *(script_flag_names() if script_flags is not None else ())]) from None
    except RecursionError:  # by absl, which looks for flags of similar names
        raise UsageError("the name of a flag is longer than any flag's; see --help") from None
    except (flags.Error, ValueError) as error:
        raise UsageError(f"{' '.join(str(error).removeprefix('flag ').split())}; see --help") from None
    given = {}
    for name, field in fields.items():
        if absl[name].present:
            texts, info = absl[name].value, field.metadata["info"]
            is_list = info.takes_arguments or info.several
            given[name] = coerce(field, texts) if is_list else [coerce(field, text) for text in texts][-1]
    return given, rest


# Flags that earlier versions had, and what to use instead.
_REMOVED = {
    **{f"benchmark_{name}": f"use benchmark_arg={name}=N" for name in ("steps", "seconds", "rounds")},
    "fail_below": "use benchmark_arg=fail_below=RATIO",
    "init_map": "set another program's weights by run.set_weights",
    "init_optimizer": "a run goes on with its optimizer's state in its own run_dir; init_from takes weights alone",
    "plot": "draw the figures of result_json",
    "powersgd_rank": "use reduce_dtype=bfloat16, or sync_every_steps=K",
    "profile": "use benchmark_arg=profile=true",
    "tokens": "use sampling=tokens=N",
    "tpu_address": "set the variable TPU_NAME",
}


def _refuse_clashes() -> None:
    for name in flags.FLAGS:
        if name in FIELDS:
            also = (
                ", such as experiment; data may be a function that reads its object, and build_model too"
                if name == "config"
                else ""
            )
            raise UsageError(
                f"{name} is a flag of Crankshaft's, and the script defines it too; give its own another name{also}"
            )


def _unknown(name: str, names: Sequence[str], otherwise: str = "see --help") -> UsageError:
    if instead := _REMOVED.get(name):
        return UsageError(f"{name} is no flag any more; {instead}")
    return UsageError(f"{name} is unknown; {nearest(name, names, otherwise)}")


def _typed(values: Mapping[str, Any], arguments: Sequence[str] = ()) -> tuple[Values, Values]:
    """Converts values to their flags' types, and those of a script's own flags. Raises `UsageError`."""
    given: Values = {}
    script_values: Values = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in FIELDS:
            given[name] = coerce(FIELDS[name], value)
        elif name not in flags.FLAGS:
            raise _unknown(name, [*arguments, *FIELDS, *script_flag_names()], "see crankshaft train --help")
        elif isinstance(flag := flags.FLAGS[name], flags.MultiFlag):
            items = value if isinstance(value, (list, tuple)) else [value]
            script_values[name] = [_parse_script_value(flag, item) for item in items]
        else:
            script_values[name] = _parse_script_value(flag, value)
    return given, script_values


def _parse_script_value(flag: flags.Flag, value: Any) -> Any:
    try:
        try:
            return flag.parser.parse(value)
        except TypeError:  # a number of NumPy's, a path, or a number of a flag of text
            return flag.parser.parse(str(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{flag.name}={value} can't be used: {error}") from None


def _merged(sources: Sequence[Values]) -> Values:
    """Merges the values of several sources; later ones replace earlier ones.

    It replaces a length also where it gives it in another unit; NAME=VALUE arguments and lists are added to.
    """
    values: Values = {}
    for source in sources:
        replaced = replaced_by(source.keys())
        before = {name: value for name, value in values.items() if name not in replaced}
        values = {**before, **source}
        for name in before.keys() & source.keys():
            if name in ARGUMENTS:
                values[name] = {**before[name], **source[name]}
            elif FIELDS[name].metadata["info"].several:
                values[name] = [*before[name], *source[name]]
    return values


def to_words(values: Mapping[str, Any]) -> list[str]:
    """Formats values as the words of a command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            words += [f"--{name}={key}={argument}" for key, argument in value.items()]
        else:
            words += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return words


def names(words: Sequence[str]) -> set[str]:
    """Finds the names of the flags that words give."""
    return {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}


def without_flagfiles(arguments: Sequence[str]) -> list[str]:
    """Replaces each `--flagfile=FILE` by the lines of the file, as absl does.

    A length in such a file is ignored if the command line sets the length by another flag. absl's own
    `read_flags_from_files` would wait for a pipe's other end, and read a device without end.
    """
    left, read, opened = list(arguments), [], 0
    replaced = replaced_by(names(arguments))
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
        text = paths.read_text("--flagfile", path, "give a file of flags, one a line")
        lines = (line.strip() for line in text.splitlines())
        left[:0] = (
            line for line in lines if line and not line.startswith(("#", "//")) and replaced.isdisjoint(names([line]))
        )
    return read


def _load_config_files(words: Sequence[str], known_only: bool = False) -> list[tuple[Values, Values]]:
    # Found before absl reads the words: a script's flags get a file's values first, which the command line's replace.
    found = []
    for index, word in enumerate(words):
        flag, separator, value = word.lstrip("-").partition("=")
        if flag == "config" and word.startswith("-"):
            found.append(value if separator else "".join(words[index + 1 : index + 2]))
    return [_load_config_file(path, names(words), known_only) for path in found]


def _load_config_file(path: str, given_names: Collection[str], known_only: bool = False) -> tuple[Values, Values]:
    """Converts the values that a file gives the flags, and those of a script's own flags. Raises `UsageError`.

    The file is YAML, JSON, or the config.json that a run has left. Of a run, which may be anyone's, no code and no flag
    of one call is taken, and those that are for a run_dir only if the caller gives it too.
    """
    values = load_mapping("config", path, "flags", "learning_rate: 0.01")
    is_run = os.path.basename(path) == NAMES.config and RunDir(os.path.dirname(path)).is_runs
    if {"flags", "deciding"} <= set(values):
        is_run = True
        in_run, deciding = (_mapping(path, name, values[name]) for name in ("flags", "deciding"))
        script = _mapping(path, "script_flags", deciding.get("script_flags", {}))
        values = {name: value for name, value in script.items() if name not in FIELDS} | in_run
    if is_run:
        values = _without_flags_of_one_call(path, values, given_names)
    for name in ("config", "flagfile"):
        if values.get(name) is not None:
            raise UsageError(
                f"config={path}: {name}={values[name]} is not read within a file; give the command line both files, "
                f"config={path} {name}={values[name]}"
            )
    try:
        given, script_values = _typed(
            {name: value for name, value in values.items() if name in FIELDS or not known_only}
        )
    except UsageError as error:
        raise UsageError(f"config={path}: {error.message}") from None
    if is_run:
        given = saved_config.without_places(f"config={path}", given, given_names)
    return given, script_values


def _without_flags_of_one_call(path: str, values: Values, given_names: Collection[str]) -> Values:
    """Leaves out of a run's values those that the next call gives again, and logs which."""
    of_absl = {*flags.FLAGS, "flagfile"} - {*FIELDS, *script_flag_names()}
    of_run_dir = () if "run_dir" in given_names else _RUN_DIR_FLAGS
    kept = {
        name: value
        for name, value in values.items()
        if name not in {*saved_config.PER_CALL_FLAGS, *of_absl, *of_run_dir}
    }
    unsaid = {*given_names, *kept, *of_run_dir, "run_dir", "config"}
    changed = {n: v for n, v in values.items() if n not in unsaid and v not in (None, vars(Flags()).get(n))}
    if changed:
        logging.warning(
            "config=%s is a run's, of which these are not taken: %s; give those that the new run needs too",
            path,
            " ".join(f"{name}={short(value)}" for name, value in changed.items()),
        )
    return kept


def load_mapping(flag: str, path: str, content: str, example: str) -> Values:
    """Reads the mapping that a YAML or JSON file holds; numbers and words of YAML as text, see `UntypedText`.

    Args:
      content: contents of the file, e.g. "flags".
      example: a line of such a file.

    Raises:
      UsageError: the file can't be read, or is not a mapping.
    """
    text = paths.read_text(flag, path, f"give a YAML or JSON file of {content}")
    try:
        is_json = path.endswith(".json")
        values = json.loads(text, object_pairs_hook=_without_repeats) if is_json else _from_yaml(flag, path, text)
    except RecursionError:
        raise _unreadable(flag, path, "it is nested too deep") from None
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise _unreadable(flag, path, " ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise UsageError(f"{flag}={path} is not a mapping of {content}; write lines such as {example}")
    return values


def _unreadable(flag: str, path: str, why: str) -> UsageError:
    return UsageError(f"{flag}={path} is not readable as such ({why}); mend it")


def _mapping(path: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unreadable("config", path, f"its {name} is not an object")
    return value


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the dictionary of these pairs. Raises ValueError where a name comes twice."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"{name} is set twice")
        unique[name] = value
    return unique


def _from_yaml(flag: str, path: str, text: str) -> Any:
    """Reads YAML as text, but for null: which word is a number, and which is true, is the flag's to decide."""
    with importing("yaml", f"{flag}={path} needs PyYAML; pip install PyYAML, or give a .json"):
        import yaml

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):  # a few of these are a file of any size
                raise ValueError(f"*{self.peek_event().anchor} repeats another part; write it out")
            return super().compose_node(parent, index)

    def plain(node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return _without_repeats([(str(plain(name)), plain(value)) for name, value in node.value])
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        if node.style is not None:  # with quotes
            return node.value
        return None if node.value in ("", "~", "null", "Null", "NULL") else UntypedText(node.value)

    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    return node and plain(node)
