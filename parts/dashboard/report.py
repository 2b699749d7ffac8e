"""Print runs as a table and a result as Markdown, or write them as a page of HTML.

For example:

  crankshaft report runs
  crankshaft report rate.json
  crankshaft report runs/first --html=first.html
  crankshaft report runs/first runs/second --html=both.html

The page is the one that crankshaft monitor shows, with its data inside: one file, to be opened or mailed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ...engine.errors import one_line
from ...runner.command_line import command_flags, help
from ...runner.command_line.rules import Path, flag
from ...runner.command_line.values import short
from ...runner.failures import UsageError
from ...runner.host.text_files import write_user_file
from . import page, result_text
from .recorded_run import RecordedRun, moment, recorded_runs


@dataclasses.dataclass(kw_only=True)
class ReportFlags:
    """The values of a command line."""

    html: str | None = flag(Path(), None, "File of the page; an existing one is replaced.")


def main(argv: list[str]) -> int:
    """Prints or writes a report by the command line."""
    usage = "crankshaft report RUN_DIR|FOLDER_OF_RUNS|RESULT.json ... [--html=FILE]"
    flags, paths = command_flags.read(argv, ReportFlags, usage, takes_words=True)
    if not paths:
        raise UsageError("the run's folder is missing; name it: crankshaft report RUN_DIR")
    if flags.html:
        write_user_file(flags.html, shown(*paths).html)
        help.show(f"written to {flags.html}")
    runs = recorded_runs(paths)
    if len(runs) == 1 and runs[0].result:
        help.show(result_text.markdown(runs[0].result))
    help.show("\n".join(result_text.aligned(_table(runs))))


def shown(*paths: str) -> page.Shown:
    """Returns the page of runs' folders and of results, for a notebook."""
    # The whole record, however long it takes: nothing can be read later.
    return page.Shown({"runs": [run.shown(seconds=math.inf) for run in recorded_runs(paths)]})


def _table(runs: Sequence[RecordedRun]) -> result_text.Section:
    """Makes the table of runs, with a column for each flag in which they differ."""
    held = [run.shown(seconds=math.inf) for run in runs]
    flags = [one["view"].get("latest", {}).get("config", {}).get("values") or {} for one in held]
    names = sorted({name for values in flags for name in values} - {"run_dir", "result_json"})
    known = [values for values in flags if values]
    differing = [name for name in names if len({short(values.get(name)) for values in known}) > 1]
    head = ("run", "started", "steps", "best", *differing, "state")
    rows = [_row(run, one, values, differing) for run, one, values in zip(runs, held, flags, strict=True)]
    return result_text.Section("Runs", head, (False, False, True, *[False] * (len(head) - 3)), rows)


def _row(run: RecordedRun, shown: dict[str, Any], flags: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    view, result, number = shown["view"], run.result, result_text.number
    latest, best = view.get("latest", {}), view.get("best")
    if result:  # a file of result_json, of which no more is known
        best, step = result.get("best"), result.get("step")
        ended = f"ended: {result['stop'] or 'done'}" if "stop" in result else f"mode {result['mode']}"
        state = str(result.get("error") or ended)
        best = best and {**best, "name": best["metric"]}
    else:
        step = (latest.get("end") or latest.get("window") or {}).get("step")
        state = view.get("problem") or shown.get("state", ("",))[0]
    started = moment(view["first"])[:-3] if view.get("first") else "–"
    shown_best = f"{best['name']} {number(best['value'])}" if best else "–"
    values = ("–" if flags.get(name) is None else short(flags[name]) for name in names)
    return tuple(map(one_line, (shown["name"], started, number(step), shown_best, *values, state)))
