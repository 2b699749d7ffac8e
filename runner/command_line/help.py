"""The text of --help: every flag by group, or those that most runs use. Nothing here starts TensorFlow."""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from absl import flags

from .. import terminal
from ..failures import EXIT_FAILED, fail
from . import registry
from .flags import FIELDS, GROUPS
from .rules import Boolean, coerce, default_value

ESSENTIAL = (  # what --helpshort has
    "mode model model_arg input input_arg data_dir validation_split run_dir config seed strategy num_virtual_devices "
    "train_steps train_epochs global_batch_size optimizer learning_rate learning_rate_schedule precision jit "
    "eval_every_steps checkpoint_every_minutes early_stopping restore_best result_json"
).split()


def module_doc(module: str) -> str:
    """Reads a module's docstring; from its source if Python omits docstrings (-OO)."""
    loaded = sys.modules[module]
    path = getattr(loaded, "__file__", None)
    return loaded.__doc__ or (path and ast.get_docstring(ast.parse(pathlib.Path(path).read_bytes()))) or ""


def help_text(
    program: str,
    doc: str,
    script_flags: list[str],
    words: Sequence[str],
    to_trainer: Callable[[ModuleType], type | None] | None = None,
) -> str:
    """Lists all flags, by group, with their defaults, and the arguments of the model and the input that are named.

    Args:
      script_flags: names of flags that the user's script defined.
      words: words of the command line: `--model=NAME` and `--input=NAME` among them are looked up.
    """
    parts = [introduction(doc), "", f"usage: {program} [flags]"]
    if script_flags:
        parts += ["", "This script:"]
    for flag in (flags.FLAGS[name] for name in script_flags):
        shown = "" if flag.default in (None, "", []) else f" [{flag.default}]"
        parts.append(described(f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}=...", f"{flag.help}{shown}"))
    for title, names in GROUPS.items():
        parts += ["", f"{title}:", *(flag_help(FIELDS[name]) for name in names)]
    for kind, known in registry.NAMES.items():
        parts += ["", f"{kind.capitalize()}s (--{kind}=NAME --help shows one's arguments):"]
        named = [coerce(FIELDS[kind], word.partition("=")[2]) for word in words if word.startswith(f"--{kind}=")]
        parts += [_shown(kind, registry.find(kind, name, to_trainer)) for name in named] or [
            f"  {line}" for line in terminal.wrapped(", ".join(known), _columns() - 2)
        ]
    return "\n".join(parts)


def show(text: str) -> NoReturn:
    """Prints a text and exits; a full disk is a failure, a reader that closes early, such as `head`, is not."""
    code = 0
    try:
        print(text, flush=True)
        lost = getattr(sys.stdout, "lost", None)  # within `main`, whose stream raises nothing
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it exits
        lost = None if isinstance(error, BrokenPipeError) else error
    if lost:
        code = fail(EXIT_FAILED, f"a part of the output is lost: {lost.strerror}")
    sys.exit(code)


def _shown(kind: str, entry: registry.Entry) -> str:
    """Describes a model or input for --help: its summary, its arguments and their defaults."""
    arguments = [*entry.required, *(f"{name}={as_typed(value)}" for name, value in entry.defaults.items())]
    shown = f" [--{kind}_arg {' '.join(arguments)}]" if arguments else ""
    return described(entry.name, f"{entry.summary}{shown}")


def as_typed(value) -> str:
    """Formats a default as it would be written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def short_help_text(program: str, doc: str) -> str:
    """Lists the flags that most runs use: wrapped to a terminal's width, elsewhere one line per flag."""
    title = doc.strip().splitlines()[0].split(", for example")[0]
    column = max(map(len, ESSENTIAL)) + 6
    lines = [title, f"usage: {program} [flags]   (--help: all flags)"]
    for name in ESSENTIAL:
        field = FIELDS[name]
        choices = field.metadata["info"].kind.choices
        text = field.metadata["info"].help + (f" One of {', '.join(choices)}." if choices else "") + _default(field)
        parts = terminal.wrapped(text, _columns() - column) if terminal.is_terminal(sys.stdout) else [text]
        lines.append(f"  --{name}".ljust(column) + f"\n{' ' * column}".join(parts))
    return "\n".join(lines)


def flag_help(field: dataclasses.Field) -> str:
    """Returns a flag's lines of --help: how it is written, what it does, its default."""
    return described(f"--{usage(field)}", field.metadata["info"].help + _default(field))


def _default(field: dataclasses.Field) -> str:
    default = default_value(field)
    return "" if default in (None, "", [], {}) else f" [{as_typed(default)}]"


def usage(field: dataclasses.Field) -> str:
    """Shows how a flag is written, without its dashes."""
    kind = field.metadata["info"].kind
    if isinstance(kind, Boolean):
        return f"[no]{field.name}"
    placeholder = "..." if " " in kind.expected else kind.expected
    return f"{field.name}={'|'.join(kind.choices) or placeholder}"


def described(usage: str, text: str) -> str:
    """Formats a flag and its description as --help shows it; a long list of choices ends a line after a |."""
    choices = [line.replace("| ", "|") for line in terminal.wrapped(usage.replace("|", "| "), _columns() - 8)]
    lines = [f"  {choices[0]}", *(f"      {line}" for line in choices[1:])]
    lines += [f"        {line}" for line in terminal.wrapped(text, _columns() - 8)]
    return "\n".join(lines)


def introduction(doc: str) -> str:
    """Formats what --help begins with: paragraphs are wrapped, lines that begin with a space stay."""
    parts = doc.strip().split("\n\n")
    wrapped = (part if part[0] == " " else "\n".join(terminal.wrapped(part, _columns())) for part in parts)
    return "\n\n".join(wrapped)


def _columns() -> int:
    return min(110, terminal.columns())
