"""The standard set: how fast the models that everybody knows train on this machine, beside Keras fit. For example

  crankshaft benchmark
  crankshaft benchmark --workloads=mlp,cnn --strategies=one_device --rounds=5
  crankshaft benchmark --quick

Each measurement is a process of its own, the peers run in turn, and the table has medians. It is printed, and written
to docs/benchmarks/ with all figures. Leave the machine alone while it runs.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from .. import errors
from ..command_line import own_flags, paths, rules
from ..errors import UsageError
from ..host import files
from . import report, schema
from .children import Stopped, stoppable, untuned
from .suite import STRATEGIES, Row, Setup, Suite, find_setup
from .workloads import BATCH_SIZE, WORKLOADS

FLAGS = flags.FlagValues()  # apart from crankshaft train's, which are the measurements'
_QUICK_SECONDS = 1.0


def _define_flags() -> None:
    own = {"flag_values": FLAGS}
    rules.names("workloads", list(WORKLOADS), f"Some of {', '.join(WORKLOADS)}.", known=WORKLOADS, **own)
    held = f"Some of {', '.join(STRATEGIES)}; all that this machine can hold."
    rules.names("strategies", None, held, known=STRATEGIES, **own)
    rules.whole("rounds", 3, "Measurements of each peer, in turn.", lower=1, **own)
    rules.number("seconds", 5.0, "Steady state of each measurement.", lower=0.1, upper=1e4, **own)
    flags.DEFINE_bool("quick", False, "One round of a second each, no losses compared: whether all of it runs.", **own)
    rules.path("output_dir", "docs/benchmarks", "Where the table and the figures are written.", **own)


_define_flags()


def main(argv: list[str]) -> None:
    """Measures what the command line asks for, and exits the process."""
    try:
        own_flags.read(argv, FLAGS, __doc__, "crankshaft benchmark [flags]")
        paths.check_writable("output_dir", FLAGS.output_dir)
        code = _run(argv, os.environ)
    except UsageError as error:
        code = errors.fail(errors.EXIT_USAGE, str(error))
    except KeyboardInterrupt:  # before the first measurement
        code = errors.fail(errors.EXIT_INTERRUPTED, "interrupted")
    sys.exit(code)


def _run(argv: list[str], environment: Mapping[str, str]) -> int:
    setups = {strategy: find_setup(strategy, environment) for strategy in FLAGS.strategies or STRATEGIES}
    left_out = {strategy: why for strategy, why in setups.items() if isinstance(why, str)}
    for strategy, why in left_out.items():
        print(f"{strategy} is left out: {why}", flush=True)
    rows = _rows([setup for setup in setups.values() if isinstance(setup, Setup)])
    rounds, seconds = (1, _QUICK_SECONDS) if FLAGS.quick else (FLAGS.rounds, FLAGS.seconds)
    suite = Suite(rows, rounds, seconds, quality=not FLAGS.quick, environment=untuned(environment))
    about: dict[str, Any] = {
        "date": schema.heading(BATCH_SIZE)["date"],
        "command": shlex.join(["crankshaft", "benchmark", *argv[1:]]),
        "load_before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "stopped": None,
    }
    code = 0
    try:
        with stoppable():
            suite.run()
    except Stopped as stopped:
        code = stopped.code
        about["stopped"] = "the rest: it was stopped"
    text = report.markdown(suite, about, left_out)
    print(f"\n{text}", flush=True)
    print(f"written to {_write(text, report.figures(suite, about, left_out))}", flush=True)
    return code or (errors.EXIT_FAILED if any(row.failed for row in rows) else 0)


def _rows(setups: list[Setup]) -> list[Row]:
    """Returns a row for each workload: on one device in each of its precisions, elsewhere in the first."""
    return [
        Row(name, setup, precision)
        for name in FLAGS.workloads
        for setup in setups
        for precision in WORKLOADS[name].precisions[: None if setup.strategy == "one_device" else 1]
    ]


def _write(text: str, figures: dict[str, Any]) -> str:
    """Writes both files, under a name that is free. Returns the table's path."""
    cpu = re.sub(r"[^a-z0-9]+", "-", (figures["environment"].get("cpu") or "unknown").lower()).strip("-")
    name = path = os.path.join(FLAGS.output_dir, f"{figures['date'][:10]}-{cpu}")
    number = 1
    while os.path.exists(f"{path}.md") or os.path.exists(f"{path}.json"):
        number += 1
        path = f"{name}-{number}"
    files.write_text(f"{path}.md", text)
    files.write_json(f"{path}.json", figures)
    return f"{path}.md"
