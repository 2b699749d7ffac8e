"""A script that is planned: it is executed, and its `crankshaft.main` plans instead of running."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...runner.command_line import user_files
from ...runner.failures import UsageError


def execute(program: Sequence[str], words: Sequence[str], plan: Callable[[dict[str, Any], Any, Any], int]) -> NoReturn:
    """Executes a program as Python does; its `main` plans, and exits the process.

    Args:
      program: a script's path, or -m and a module's name.
      words: the flags that the program finds on its command line.
      plan: called by `crankshaft.main` instead of running, see `user_files.instead`.

    Raises:
      UsageError: it has ended without `main`; anything else that it raises.
    """
    name, is_module = program[-1], program[0] == "-m"
    # As `python` sets them for a script or a module.
    sys.argv = [name, *words]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    before = user_files.instead.set(plan)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    finally:
        user_files.instead.reset(before)
    raise UsageError(f"{' '.join(program)} has ended without crankshaft.main, which is what is planned; call it there")
