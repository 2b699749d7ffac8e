"""Runs small trainings, injects faults that a seed determines, and checks that each ends as if nothing had happened.

    python -m benchmarks.faults --strategy=two_workers --seed=0 --faults=20

Run number i has the seed S + i, which determines the faults (`table.py`), what they strike, the steps that trigger
them, and the data, the sharded optimizer and the dtype of the training; the same seed repeats them. A synchronous run
must end with all bits of an undisturbed one, variables and metrics; with parameter servers every count must be right.
Nothing may hang longer than its timeout and 30 s, and no process may be left, nor a temporary file but AutoGraph's.
Each run is a line; at the end comes a table by fault. A run that fails prints the command that repeats it, and keeps
its folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import crankshaft
from crankshaft.engine.machine import files

from ..markdown import number, table
from . import machine
from .campaign import Campaign, Scenario
from .job import STRATEGIES, Settings
from .table import FAULTS


def line_of(result: dict) -> str:
    faults = "; ".join(f"{each['fault']} at {each['target']}, step {each['step']}" for each in result["injections"])
    costs = ", ".join(f"{each['seconds']} s and {each['steps_lost']} steps" for each in result["costs"])
    outcome = f"FAILED: {result['failed']}" if result["failed"] else f"ok, {costs}"
    if result["skipped"]:
        outcome = f"skipped: {result['skipped']}"
    settings = Settings(**result["settings"])
    return f"{settings.strategy} {result['seed']}: {faults} ({settings.title}): {outcome}"


def summary(results: list[dict]) -> str:
    """Returns the table of results by fault and strategy; of a run that was repeated the last one counts."""
    last = {json.dumps([each[key] for key in ("seed", "settings", "injections")]): each for each in results}
    found = [each for each in last.values() if not each["skipped"]]
    strategies = [name for name in STRATEGIES if any(each["settings"]["strategy"] == name for each in found)]
    of_strategy = {name: [each for each in found if each["settings"]["strategy"] == name] for name in strategies}
    rows = [(fault, *(_cell(fault, of_strategy[name]) for name in strategies)) for fault in FAULTS]
    ok = [sum(not each["failed"] for each in of_strategy[name]) for name in strategies]
    total = [f"{good} of {len(of_strategy[name])}" for good, name in zip(ok, strategies, strict=True)]
    rows = [row for row in rows if any(row[1:])]
    return table(("fault", *strategies), [*rows, ("all runs, of one or two faults", *total)])


def _cell(fault: str, results: list[dict]) -> str:
    """Returns how many runs with a fault ended well; median and worst seconds to the next step, and of steps lost."""
    of_it = [each for each in results if any(injection["fault"] == fault for injection in each["injections"])]
    costs = [cost for each in of_it for cost in each["costs"] if cost["fault"] == fault]
    ok = sum(not each["failed"] for each in of_it)
    if not of_it:
        return ""
    seconds = [each["seconds"] for each in costs if each["seconds"] is not None]
    lost = [each["steps_lost"] for each in costs]
    return f"{ok} of {len(of_it)}: {_median_and_worst(seconds)} s; {_median_and_worst(lost)}"


def _median_and_worst(values: list[float]) -> str:
    return f"{number(statistics.median(values))}, {number(max(values))}" if values else "–"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="may be repeated [all]")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each next has one more [0]")
    parser.add_argument("--faults", type=int, default=20, help="runs of each strategy [20]")
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose name has it")
    parser.add_argument("--result_json", type=Path, help="the JSON file that is written")
    parser.add_argument("--list", action="store_true", help="print what the seeds determine, and run nothing")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of such files instead")
    args = parser.parse_args()
    if args.table:
        print(summary([result for path in args.table for result in json.loads(path.read_text(encoding="utf-8"))]))
        return 0
    strategies = args.strategy or STRATEGIES
    scenarios = [
        Scenario.from_seed(args.seed + index, strategy, args.only)
        for strategy in strategies
        for index in range(args.faults)
    ]
    if args.list:
        for scenario in scenarios:
            print(scenario)
        return 0
    machine.enter()  # before there are threads
    _ = crankshaft.Trainer  # imports TensorFlow without its notes on how it starts
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # ends the job that runs
    results = []
    folder = Path(tempfile.mkdtemp(prefix="crankshaft-faults-"))
    campaign = Campaign(folder)
    for scenario in scenarios:
        results.append(result := campaign.run(scenario))
        print(line_of(result), flush=True)
        if result["failed"]:
            only = f" --only={args.only!r}" if args.only else ""
            strategy = scenario.settings.strategy
            print(f"  python -m benchmarks.faults --strategy={strategy} --seed={scenario.seed} --faults=1{only}")
            print(f"  its folder: {folder / f'seed {scenario.seed}'}", flush=True)
        if args.result_json:
            files.write_text(args.result_json, json.dumps(results, indent=1) + "\n")
    print(summary(results))
    failed = any(result["failed"] for result in results)
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
