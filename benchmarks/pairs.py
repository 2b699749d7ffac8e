"""Two commands of benchmark mode in turn, A B A B, so that a machine that drifts is fair to both: a loop over runs.

    git worktree add ../before/crankshaft COMMIT
    flags="train --mode=benchmark --model=mlp --input=digits"
    python -m benchmarks.pairs --turns=5 --fail_below=0.95 "python -m crankshaft $flags" \\
        "cd ../before && python -m crankshaft $flags"

The second command is what the first is compared with. To each is added what makes it one round and says where its
result goes, so the flags of `crankshaft train` stand last in it. The exit code is 3 if the whole interval of the ratio
lies below --fail_below, 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crankshaft.launch.benchmark import result as of_benchmark
from crankshaft.launch.benchmark.measure.intervals import compare
from crankshaft.launch.command_line.values import differences

from .children import MeasurementFailed, Process, Series
from .markdown import number, table
from .race import run_script


def measured(commands: Sequence[str], turns: int) -> dict[str, Any]:
    """Runs both commands so many times in turn, each run in a process of its own.

    Returns:
      commands; results: of either, whole, in order; and what `compare` returns of them, with `warnings`.

    Raises:
      MeasurementFailed: a run failed, or was not benchmark mode's.
    """
    series = Series(2 * turns, os.environ)
    results: list[list[dict]] = [[], []]
    for turn in range(1, turns + 1):
        for side, (name, command) in enumerate(zip(("this", "the baseline"), commands, strict=True)):
            result = series.measure(f"turn {turn} of {name}", lambda path, command=command: _process(command, path))
            if problems := of_benchmark.problems(result):
                raise MeasurementFailed(f"what {name} wrote to --result_json is not such a result: {problems[0]}")
            results[side].append(result)
    ours, theirs = results
    warnings = [line for result in ours for line in result["warnings"]]
    warnings += [line for result in theirs for line in of_benchmark.warnings(ours[0], result)]
    if other := differences(*map(of_benchmark.measured_work, (theirs[0], ours[0]))):
        warnings.append(f"baseline: it is of other work ({'; '.join(other)})")
    return {
        "commands": list(commands),
        "results": results,
        **compare(ours, theirs),
        "warnings": list(dict.fromkeys(warnings)),
    }


def _process(command: str, path: Path) -> Process:
    flags = f"--benchmark_arg=rounds=1 --result_json={shlex.quote(str(path))}"
    return Process(["/bin/sh", "-c", f"{command} {flags}"])


def shown(result: dict[str, Any]) -> str:
    """Returns the pairs as a table, then the verdict and the warnings."""
    rows = [
        [str(turn), number(each["ours"]), number(each["theirs"]), f"{each['ratio']:.3f}"]
        for turn, each in enumerate(result["rounds"], 1)
    ]
    ends = " to ".join(f"{end:.3f}" for end in result["interval"] or ())
    verdict = f"{result['verdict']}: {result['ratio']:.3f}x{f', 95 % interval {ends}' if ends else ''}"
    lines = [f"warning: {line}" for line in result["warnings"]]
    return "\n".join([table(["turn", "this, examples/s", "the baseline", "ratio"], rows), "", verdict, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="a benchmark, flags of crankshaft train last")
    parser.add_argument("baseline", help="the command that it is compared with")
    parser.add_argument("--turns", type=int, default=5, help="runs of each (%(default)s)")
    parser.add_argument("--fail_below", type=float, help="exit with 3 if the rate is shown to be below this times it")
    parser.add_argument("--json", help="write all results here too")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error(f"--turns={args.turns} measures nothing; use 1 or more")
    result = measured([args.command, args.baseline], args.turns)
    print(f"\n{shown(result)}")
    if args.json:
        Path(args.json).write_text(json.dumps(result), encoding="utf-8")
    sys.exit(of_benchmark.exit_code(result, args.fail_below))


if __name__ == "__main__":
    run_script(main)
