"""The command line of a command with flags of its own, apart from crankshaft train's, and its --help.

Nothing here starts TensorFlow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from absl import flags
from absl.testing import flagsaver

from ..errors import UsageError, nearest
from . import given, help, rules
from .flags import GROUPS, REPLACED


def read(
    argv: list[str],
    values: flags.FlagValues,
    doc: str,
    usage: str,
    *,
    of_tasks: Collection[str] = (),
    words: str = "write --NAME=VALUE",
    takes_words: bool = False,
) -> list[str]:
    """Sets a command's flags by its command line, and returns its words; for --help, shows them and exits.

    Args:
      argv: the program's name and what follows.
      values: the command's own flags.
      doc: what --help begins with.
      usage: how the command is called.
      of_tasks: names of flags that are for the tasks which it starts, and so stand after --.
      words: what to do about a word that is not a flag.
      takes_words: whether the command takes such words, before its flags and after.

    Raises:
      UsageError: a flag is unknown or its value wrong, or a word is not a flag.
    """
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv[1:]):
        parts = [help.introduction(doc), "", f"usage: {usage}", ""]
        help.show("\n".join([*parts, *(_described(values[name]) for name in values)]))
    values.set_gnu_getopt(takes_words)
    try:
        rest = values([argv[0], *given.without_flagfiles(argv[1:])])[1:]
    except flags.UnrecognizedFlagError as error:
        if {error.flagname, error.flagname.removeprefix("no")} & set(of_tasks):
            raise UsageError(f"--{error.flagname} is a flag of the tasks; write it after --, see --help") from None
        near = nearest(error.flagname, list(values), "see --help")
        raise UsageError(f"--{error.flagname} is unknown; {near}") from None
    except flags.Error as error:
        raise rules.explain(error, values) from None
    if rest and not takes_words:
        raise UsageError(f"{rest[0]!r} is not a flag; {words}, see --help")
    return rest


def program_of(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Splits what stands after -- into the program of the tasks and its arguments.

    Args:
      words: a script's path, or -m and a module's name, and its flags; or flags of crankshaft train alone.

    Returns:
      The words after `python` that start the program, none for crankshaft train, and all others.

    Raises:
      UsageError: the first word is none of these.
    """
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


def check_of_tasks(words: Sequence[str], has_own: bool) -> None:
    """Raises `UsageError` for a mistake in what the tasks are given; no file that a flag names is read.

    Args:
      words: flags of crankshaft train.
      has_own: whether the tasks' program may have flags of its own too.
    """
    read_there = ("--flagfile", "-flagfile", "--config", "-config")
    with flagsaver.flagsaver():
        flags.FLAGS.set_gnu_getopt(True)
        try:
            rest = flags.FLAGS(["task", *(word for word in words if word.partition("=")[0] not in read_there)], has_own)
        except flags.UnrecognizedFlagError as error:
            near = REPLACED.get(error.flagname) or nearest(
                error.flagname, [name for names in GROUPS.values() for name in names], "see --help"
            )
            raise UsageError(f"--{error.flagname} is unknown to crankshaft train; {near}") from None
        except flags.Error as error:
            raise rules.explain(error, flags.FLAGS) from None
    if len(rest) > 1 and not has_own:
        raise UsageError(f"{rest[1]!r} is not a flag of crankshaft train; write --NAME=VALUE")


def _described(flag: flags.Flag) -> str:
    default = f"{flag.default:g}" if isinstance(flag.default, float) else help.as_given(flag.default)
    shown = f" [{default}]" if flag.default or (flag.default == 0 and not flag.boolean) else ""
    return help.described(f"--{help.usage(flag)}", f"{help.about(flag)}{shown}")
