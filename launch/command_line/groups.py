"""The groups of `crankshaft train`'s flags, and how a flag of a group is defined."""

from __future__ import annotations

from absl import flags

from .uses import Use

flags.disclaim_key_flags()  # as in rules.py

# Group title -> names, in the order of --help. Filled where the flags are defined.
GROUPS: dict[str, list[str]] = {}
HELP: dict[str, str] = {}  # as written: absl adds to the help
USES: dict[str, Use] = {}  # the use of each flag that is not for all runs


def group(title: str, for_all: Use | None = None):
    """Returns a function that defines flags of this group; `only`, or `for_all`, says what a flag is for."""
    names = GROUPS.setdefault(title, [])

    def define(kind, name: str, default, help: str, only: Use | None = None, **more) -> None:
        kind(name=name, default=default, help=help, **more)
        if use := for_all if only is None else only:
            USES[name] = use
        names.append(name)
        HELP[name] = help

    return define
