"""The command line and --help of a command that has other flags than crankshaft train.

Nothing here starts TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from ..failures import UsageError
from . import help, parsing
from .flags import FIELDS
from .rules import fields

T = TypeVar("T")


def read(
    argv: list[str],
    command: type[T],
    usage: str,
    *,
    words: str = "write --NAME=VALUE",
    takes_words: bool = False,
    has_tasks: bool = False,
    takes_others: bool = False,
) -> tuple[T, list[str]]:
    """Reads a command's flags from its command line, and its words; for --help, shows the flags and exits.

    Args:
      argv: the program's name and what follows.
      command: dataclass whose fields are the command's own flags; --help begins with its module's docstring.
      words: fix for a word that is not a flag, for the message.
      takes_words: whether the command takes such words, before its flags and after.
      has_tasks: whether it starts tasks, whose flags of crankshaft train follow --.
      takes_others: whether it takes other flags too, which are words then.

    Raises:
      UsageError: a flag is unknown or its value wrong, or a word is not a flag.
    """
    command_fields = fields(command)
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv[1:]):
        parts = [help.introduction(help.module_doc(command.__module__)), "", f"usage: {usage}", ""]
        help.show("\n".join([*parts, *map(help.flag_help, command_fields.values())]))
    for name in parsing.names(argv[1:]) if has_tasks else ():
        if name not in command_fields and {name, name.removeprefix("no")} & FIELDS.keys():
            raise UsageError(f"{name} is a flag of the tasks; write it after --, see --help")
    given, between = parsing.without_flagfiles(argv[1:]), takes_words or takes_others
    values, rest = parsing.parse_words(given, command_fields, known_only=takes_others, between=between)
    if rest and not (takes_words or takes_others):
        raise UsageError(f"{rest[0]!r} is not a flag; {words}, see --help")
    return command(**values), rest


def split_program(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Splits the words after -- into the tasks' program and its arguments.

    Args:
      words: a script's path, or -m and a module's name, and its flags; or flags of crankshaft train, which may stand
        after `train` or `crankshaft train`, unless a file has that name.

    Returns:
      The words after `python` that start the program, none for crankshaft train, and all others.

    Raises:
      UsageError: the first word is none of these.
    """
    for command in (("train",), ("crankshaft", "train")):
        if tuple(words[: len(command)]) == command and not os.path.exists(words[0]):
            return (), list(words[len(command) :])
    first, *rest = words
    if first == "-m":
        if not rest or not all(part.isidentifier() for part in rest[0].split(".")):
            raise UsageError(f"-m {rest[0] if rest else ''} names no module; write -m package.module, as for Python")
        return ("-m", rest[0]), rest[1:]
    if first.startswith("-"):
        return (), list(words)
    if not first.endswith(".py"):
        raise UsageError(
            f"{first!r} is neither a flag of crankshaft train nor a script; write --NAME=VALUE, a path to a .py, or -m "
            "and a module's name"
        )
    return (first,), rest


def check_script_exists(program: Sequence[str]) -> None:
    """Raises `UsageError` if a program, see `split_program`, is a script that does not exist."""
    if len(program) == 1 and not os.path.isfile(program[0]):
        raise UsageError(f"the script {program[0]} does not exist; give its path from {os.getcwd()}")
