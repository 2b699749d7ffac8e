"""Print a benchmark's result as Markdown, or write runs and results as a page of HTML.

For example:

  crankshaft report rate.json
  crankshaft report runs/first --html=first.html
  crankshaft report runs/first runs/second --html=both.html

The page is the one that crankshaft monitor shows, with its data inside: one file, to be opened or mailed.
"""

from __future__ import annotations

import dataclasses
import math
import os

from ..benchmark import benchmark_report
from ..command_line import command_flags, help
from ..command_line.rules import Path, flag
from ..failures import UsageError
from ..host.text_files import write_user_file
from . import page
from .recorded_run import RecordedRun


@dataclasses.dataclass(kw_only=True)
class ReportFlags:
    """The values of a command line."""

    html: str | None = flag(Path(), None, "File of the page; an existing one is replaced.")


def main(argv: list[str]) -> int:
    """Prints or writes a report by the command line."""
    usage = "crankshaft report RESULT.json | crankshaft report RUN_DIR|RESULT.json ... --html=FILE"
    flags, paths = command_flags.read(argv, ReportFlags, usage, takes_words=True)
    if flags.html and paths:
        write_user_file(flags.html, shown(*paths).html)
        help.show(f"written to {flags.html}")
    if len(paths) != 1:
        raise UsageError(
            f"{len(paths)} paths instead of one; use crankshaft report RESULT.json, or any with --html=FILE"
        )
    if os.path.isdir(paths[0]):
        raise UsageError(f"{paths[0]} is a run's folder, which is shown as a page; add --html=FILE")
    help.show(benchmark_report.markdown(benchmark_report.read(paths[0])))


def shown(*paths: str) -> page.Shown:
    """Returns the page of runs' folders and of results, for a notebook."""
    # The whole record, however long it takes: nothing can be read later.
    return page.Shown({"runs": [RecordedRun(path).shown(seconds=math.inf) for path in paths]})
