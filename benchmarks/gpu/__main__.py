"""Measures training on one GPU in a few minutes: `python -m benchmarks.gpu --minutes=8 --json=gpu.json`.

Prints one table, the most important rows first. Each row has a time limit, and rows that share a model share a process;
what is measured is printed and written as it comes, so that a run that is cut off still has its first rows. `--tiny`
measures every row on the CPU with small sizes. `--rows=mlp` measures those whose names contain one of the words given.

The machine needs TensorFlow and CUDA's libraries: `pip install -c constraints.txt 'tensorflow[and-cuda]'`. For one that
reaches no package index, and to which little can be sent at a time, `python -m benchmarks.gpu.package` packs them.

MFU is tokens per second times (6 x parameters + 12 x layers x width x context) operations, divided by the 989 TFLOP/s
of an H100 or H200 in 16 bits, also in rows of float32 (which is TF32). `kernels` is the share of all kernels' time that
the ten most expensive take, those of all layers added up; `busy` is the time of all kernels, divided by that of the
steps: the rest of the time, the device waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crankshaft.parts.launchers.children import Child, Children
from crankshaft.parts.launchers.output import last_lines

from ..markdown import number, table
from ..peer import write_result
from ..processes import ROOT, run_script
from .rows import Row, rows

_START_SECONDS = 60.0  # of a process, until its first row begins
_PATIENCE = 10  # times as long are limits on a CPU, which may be busy with other work
_POLL_SECONDS = 0.1
_FEWEST_SECONDS = 15.0  # with less left, no row begins
_LOG_LINES = 5
_HEADER = ("row", "batch", "per second", "MFU", "peak MiB", "first step, s", "kernels", "busy", "input wait", "remarks")


class Measurements:
    """Results of rows by title, printed and written as they come.

    Args:
      path: of the JSON file, or None.
      command: as typed.
    """

    def __init__(self, path: str | None, command: Sequence[str]):
        self.content: dict[str, Any] = {"command": list(command), "machine": None, "rows": {}}
        self._path = path

    def add(self, row: Row | None, result: dict[str, Any]) -> None:
        """Adds a row's result, or the machine's description."""
        if row is None:
            self.content["machine"] = result
        else:
            self.content["rows"][row.title] = result
            figures = result.get("failed") or " | ".join(filter(None, [*cells(row, result), result.get("note")]))
            print(f"{row.title}: {figures}", flush=True)
        if self._path:
            write_result(f"{self._path}.new", self.content)
            os.replace(f"{self._path}.new", self._path)

    def text(self, measured: Sequence[Row]) -> str:
        """Formats the table, and the ten most expensive kernels of each language model."""
        results, lines = self.content["rows"], []
        for row in measured:
            result = results.get(row.title, {"failed": "not reached"})
            lines.append([row.title, *cells(row, result), remark(row, result, results)])
        kernels = [
            f"{row.title}: " + "; ".join(f"{name:.60} {ms:.3g} ms {share:.0%}" for name, ms, share in result["kernels"])
            for row in measured
            if row.context and "kernels" in (result := results.get(row.title, {}))
        ]
        return "\n".join([json.dumps(self.content["machine"]), "", table(_HEADER, lines), "", *kernels])


def cells(row: Row, result: Mapping[str, Any]) -> list[str]:
    """Formats a result's figures; the cell of a figure that was not measured is empty."""
    share = {name: result.get(name) for name in ("mfu", "busy", "input_wait_fraction")}
    percent = {name: "" if value is None else f"{value:.1%}" for name, value in share.items()}
    kernels = sum(each[2] for each in result.get("kernels", ()))
    rate = result.get(f"{row.unit}_per_sec")
    return [
        str(result.get("batch", "")),
        f"{number(rate)} {row.unit}" if rate else "",
        percent["mfu"],
        *(number(result[name]) if result.get(name) else "" for name in ("device_peak_mb", "first_step_seconds")),
        f"{kernels:.0%}" if kernels else "",
        percent["busy"],
        percent["input_wait_fraction"],
    ]


def remark(row: Row, result: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Returns why a row has no figures; what jit=auto chose, and whether it was faster; or the row's own note."""
    if "failed" in result or row.jit != "auto":
        return result.get("failed") or result.get("note", "")
    rates = {
        way: results.get(row.title.replace("jit=auto", f"jit={way}"), {}).get("steps_per_sec") for way in ("on", "off")
    }
    known = {way: rate for way, rate in rates.items() if rate}
    chosen = "on" if result["jit"] else "off"
    verdict = "" if len(known) < 2 else f"; the {'faster' if chosen == max(known, key=known.get) else 'slower'} one"
    return f"{result['choice']}{verdict}"


def measure(measured: Sequence[Row], measurements: Measurements, deadline: float, tiny: bool) -> None:
    """Measures rows until a deadline of `time.monotonic`, those of a process together."""
    waiting = list(measured)
    while waiting and time.monotonic() < deadline - _FEWEST_SECONDS:
        _, rest = next(itertools.groupby(waiting, key=lambda row: row.process))
        together = list(rest)
        waiting = waiting[_measure_together(together, measurements, deadline, tiny) :]


def _measure_together(together: Sequence[Row], measurements: Measurements, deadline: float, tiny: bool) -> int:
    """Measures rows in one process, up to the first that ends it or passes its limit; returns how many are done."""
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        results, log = Path(folder, "results"), Path(folder, "log")
        results.touch()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            f"--child={results}",
            *(f"--title={row.title}" for row in together),
        ]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **({"CUDA_VISIBLE_DEVICES": "-1"} if tiny else {})}
        with log.open("wb") as output:
            command += ["--tiny"] * tiny
            child = children.start(command, env=environment, cwd=ROOT, stdout=output, stderr=output)
        patience = _PATIENCE if tiny else 1
        done, limit = 0, time.monotonic() + patience * (_START_SECONDS + together[0].seconds)
        with results.open(encoding="utf-8") as lines:
            while done < len(together):
                if line := lines.readline():
                    title, result = json.loads(line)
                    row = next((row for row in together if row.title == title), None)
                    measurements.add(row, result)
                    done += row is not None
                    if done < len(together):
                        limit = time.monotonic() + patience * together[done].seconds
                elif why := _end(child, min(limit, deadline), limit):
                    tail = " / ".join(last_lines(log.read_bytes())[-_LOG_LINES:])
                    measurements.add(together[done], {"failed": f"{why}: {tail}"})
                    return done + 1
        return done


def _end(child: Child, until: float, limit: float) -> str:
    """Waits a moment; returns why the present row has to end, if it has."""
    if child.code is not None:
        return f"its process ended with {child.code}"
    if time.monotonic() > until:
        return "its time limit" if until == limit else "the time was up"
    time.sleep(_POLL_SECONDS)
    return ""


def serve(path: str, measured: Sequence[Row], tiny: bool) -> None:
    """Measures rows in this process; adds to the file a line of JSON, [title, result], for each of them."""
    from . import measures

    with open(path, "a", encoding="utf-8", buffering=1) as results:
        results.write(json.dumps(["machine", measures.machine()]) + "\n")
        for row in measured:
            try:
                result = getattr(measures, row.measure)(row, tiny)
            except Exception as error:
                traceback.print_exc()
                result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            results.write(json.dumps([row.title, result]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no row goes on (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU: a test of the script")
    parser.add_argument("--json", help="file for the results, whole after each row")
    parser.add_argument("--rows", default="", help="words, separated by commas: only rows whose names contain one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--title", action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [row for row in rows(arguments.tiny) if any(word in row.title for word in arguments.rows.split(","))]
    if arguments.child:
        serve(arguments.child, [row for row in wanted if row.title in arguments.title], arguments.tiny)
        return
    if not wanted:
        parser.error(f"--rows={arguments.rows} names no row; there are: {'; '.join(row.title for row in rows())}")
    measurements = Measurements(arguments.json, sys.argv)
    try:
        measure(wanted, measurements, time.monotonic() + 60 * arguments.minutes, arguments.tiny)
    finally:
        print(f"\n{measurements.text(wanted)}")


if __name__ == "__main__":
    run_script(main)
