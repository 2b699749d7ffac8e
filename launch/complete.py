"""Answers a shell that completes a command line of `crankshaft`; see docs/flags.md. Nothing here starts TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from .command import COMMANDS
from .command_line import registry
from .command_line.flags import FIELDS
from .command_line.rules import Boolean, fields


def main(argv: Sequence[str]) -> None:
    """Prints the completions at the cursor, a line each, and exits the process.

    Args:
      argv: the program, and the arguments of `complete -C`: the command's name, the word, the previous word.
    """
    line = os.environ.get("COMP_LINE", "")
    words = line[: int(os.environ.get("COMP_POINT", len(line)))].split()[1:]
    if not words or line[-1:] == " ":
        words.append("")
    # bash, which passes the word, takes the text after "=" as a separate word; zsh passes none.
    is_value = len(argv) > 2 and "=" in words[-1] and not argv[2].startswith("-")
    for candidate in _candidates(words):
        print(candidate.partition("=")[2] if is_value else candidate)
    sys.exit(0)


def _candidates(words: list[str]) -> list[str]:
    """Lists the completions of the last word."""
    *before, last = words
    if not before:
        return _beginning(last, COMMANDS)
    flags = _flags(before)
    name, is_value, _ = last.removeprefix("--").partition("=")
    kinds = {name: field.metadata["info"].kind for name, field in flags.items()}
    if is_value and name in kinds:
        choices = registry.NAMES.get(name) or kinds[name].choices
        return _beginning(last, (f"--{name}={choice}" for choice in choices))
    return _beginning(last, (f"--{name}{'' if isinstance(kind, Boolean) else '='}" for name, kind in kinds.items()))


def _flags(before: list[str]) -> dict[str, dataclasses.Field]:
    """Finds the flags of the command that the words begin with; after --, those of its tasks."""
    command = before[0]
    if command not in COMMANDS or command == "train" or "--" in before:
        return FIELDS
    module = import_module(COMMANDS[command][0])
    flags = fields(module.Flags) if hasattr(module, "Flags") else FIELDS
    return {**flags, **FIELDS} if getattr(module, "TAKES_FLAGS_OF_TRAIN", False) else flags


def _beginning(start: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(start)]
