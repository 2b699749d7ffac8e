"""The standard set: how fast the models that everybody knows train on this machine, beside Keras fit.

    python -m benchmarks.standard
    python -m benchmarks.standard --workloads=mlp,cnn --strategies=one_device --rounds=5

Each measurement is a process of its own, the peers run in turn, and the table has medians. It is printed, and written
to docs/benchmarks/ with all figures. Leave the machine alone while it runs. With `--rounds=1 --seconds=1
--quality_steps=0` it tries whether all of it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from typing import Any

from crankshaft.launch.benchmark.result import heading
from crankshaft.launch.host import files

from . import standard_report
from .children import Stopped, stoppable, untuned
from .race import ROOT
from .suite import QUALITY_STEPS, STRATEGIES, Row, Setup, Suite, find_setup
from .workloads import BATCH_SIZE, WORKLOADS


def main() -> None:
    args = _arguments()
    setups = {strategy: find_setup(strategy, os.environ) for strategy in args.strategies}
    left_out = {strategy: why for strategy, why in setups.items() if isinstance(why, str)}
    for strategy, why in left_out.items():
        print(f"{strategy} is left out: {why}", flush=True)
    rows = _rows(args.workloads, [setup for setup in setups.values() if isinstance(setup, Setup)])
    suite = Suite(rows, args.rounds, args.seconds, args.quality_steps, environment=untuned(os.environ))
    facts: dict[str, Any] = {
        "date": heading(BATCH_SIZE)["date"],
        "command": shlex.join(["python", "-m", "benchmarks.standard", *sys.argv[1:]]),
        "load_before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "stopped": None,
    }
    code = 0
    try:
        with stoppable():
            suite.run()
    except Stopped as stopped:
        code = stopped.code
        facts["stopped"] = "the rest: it was stopped"
    text = standard_report.markdown(suite, facts, left_out)
    print(f"\n{text}", flush=True)
    print(f"written to {_write(args.output_dir, text, standard_report.figures(suite, facts, left_out))}", flush=True)
    sys.exit(code or any(row.failed for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of %(default)s")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="steady state of each measurement (%(default)s)")
    parser.add_argument("--quality_steps", type=int, default=QUALITY_STEPS, help="before losses are compared; 0: not")
    parser.add_argument("--output_dir", default=str(ROOT / "docs" / "benchmarks"), help="for the table and the figures")
    args = parser.parse_args()
    for name, known in (("workloads", WORKLOADS), ("strategies", STRATEGIES)):
        names = getattr(args, name).split(",")
        if unknown := [each for each in names if each not in known]:
            parser.error(f"--{name}={','.join(unknown)} is unknown; use some of {', '.join(known)}")
        setattr(args, name, names)
    if args.rounds < 1 or args.seconds <= 0 or args.quality_steps < 0:
        parser.error("--rounds is 1 or more, --seconds above 0, --quality_steps 0 or more")
    return args


def _rows(workloads: list[str], setups: list[Setup]) -> list[Row]:
    """Returns a row for each workload: on one device in each of its precisions, elsewhere in the first."""
    return [
        Row(name, setup, precision)
        for name in workloads
        for setup in setups
        for precision in WORKLOADS[name].precisions[: None if setup.strategy == "one_device" else 1]
    ]


def _write(folder: str, text: str, figures: dict[str, Any]) -> str:
    """Writes both files, under a name that is free. Returns the table's path."""
    os.makedirs(folder, exist_ok=True)
    cpu = re.sub(r"[^a-z0-9]+", "-", (figures["environment"].get("cpu") or "unknown").lower()).strip("-")
    name = path = os.path.join(folder, f"{figures['date'][:10]}-{cpu}")
    number = 1
    while os.path.exists(f"{path}.md") or os.path.exists(f"{path}.json"):
        number += 1
        path = f"{name}-{number}"
    files.write_text(f"{path}.md", text)
    files.write_json(f"{path}.json", figures)
    return f"{path}.md"


if __name__ == "__main__":
    main()
