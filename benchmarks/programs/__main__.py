"""Draws programs by seeds, runs each on the sides of a relation that must hold, and compares all that they leave.

`python -m benchmarks.programs --seeds=0:200` prints a line per seed, and at the end tables by element of a program and
by relation. A seed determines the program and its relation (`relations.py`), whose first side is an oracle that shares
no code with the engine (Keras's `fit`, or a loop of a tape and NumPy), or the same program run otherwise. A program
that is wrong, crashes or hangs is shrunk, while the same relation fails, and printed as a script that stands alone.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..markdown import table
from .children import Children, Outcome
from .grammar import elements, program_from_seed, simplest, valid
from .relations import RELATIONS, difference
from .text import script

_WRONG, _MOST_TRIES = ("wrong", "failed", "crashed", "hung"), 60  # tries of a shrinking
# Documented differences from Keras (docs/keras.md): the names of values, and in which programs.
DOCUMENTED = [
    ("a layer's trainable takes effect at once", ".",
     lambda program: "freezes" in program["callbacks"] and program["epochs"] > 1),
    ("an uneven last batch counts by its examples", r"(history|metrics)/(?!val_loss$).+_loss",
     lambda program: len(program["outputs"]) > 1),
]  # fmt: skip


class Result(dict):
    """A seed's outcome, plain JSON: the program, the outcome's kind and its line."""

    @property
    def is_wrong(self) -> bool:
        return self["outcome"] in _WRONG


def judge(program: dict, children: Children) -> Result:
    """Runs a program's sides and compares them with the first; stops at the first that differs."""
    relation, began = RELATIONS[program["relation"]], time.monotonic()
    sides = relation.sides(program)

    def result(outcome: str, line: str = "") -> Result:
        return Result(program=program, outcome=outcome, line=line, seconds=round(time.monotonic() - began, 1))

    outcomes: dict[str, Outcome] = {}
    for name, how in sides.items():
        outcomes[name] = found = children.run(script(program, sides), how)
        if found.kind not in ("values", "refused"):
            # Keras itself can't run it: the grammar's fault.
            return result("invalid" if how.get("oracle") else found.kind, f"{name}: {found.line}")
    if refused := {name: each.line for name, each in outcomes.items() if each.kind == "refused"}:
        is_alike = len(refused) == len(outcomes) or program["relation"] == "oracle"
        name, line = next(iter(refused.items()))
        return result("refused" if is_alike else "wrong", line if is_alike else f"{name} alone is refused: {line}")
    (first, expected), *others = outcomes.items()
    for name, found in others:
        if difference(relation, expected.values, found.values):
            known = [(why, names) for why, names, has in DOCUMENTED if "oracle" in sides and has(program)]
            if line := difference(relation, expected.values, found.values, [names for _, names in known]):
                return result("wrong", f"{name} beside {first}: {line}")
            return result("documented", "; ".join(why for why, _ in known))
    return result("right")


def shrunk(program: dict, children: Children) -> dict:
    """Returns the simplest program found whose relation fails too, by trying each choice's simplest value."""
    tries, changed = 0, True
    while changed:
        changed = False
        for simpler in _simpler(program):
            if tries == _MOST_TRIES:
                return program
            tries += 1
            if judge(simpler, children).is_wrong:
                program, changed = simpler, True
                break
    return program


def _simpler(program: dict) -> Iterator[dict]:
    """Yields programs with one choice or one item less."""
    tried = [program]
    for name, value in simplest().items():
        values = [value]
        if isinstance(program[name], list):
            values += [program[name][:i] + program[name][i + 1 :] for i in range(len(program[name]))]
        for each in values if name not in ("kind", "relation") else ():
            simpler = valid({**program, name: each})
            if simpler not in tried and simpler["inputs"] and simpler["outputs"]:
                tried.append(simpler)
                yield simpler


def summary(results: list[Result]) -> str:
    """Returns the tables of outcomes by relation and by element, and of refusals by their lines."""
    columns = ("right", "documented", "refused", "wrong", "invalid")

    def row(name: str, found: list[Result]) -> tuple[str, ...]:
        kinds = collections.Counter("wrong" if each.is_wrong else each["outcome"] for each in found)
        return (name, str(len(found)), *(str(kinds[kind] or "") for kind in columns))

    relations = [
        row(name, found) for name in RELATIONS if (found := [r for r in results if r["program"]["relation"] == name])
    ]
    named = collections.defaultdict(list)
    for each in results:
        for element in elements(each["program"]):
            named[element].append(each)
    lines = collections.Counter(each["line"][:110] for each in results if each["outcome"] in ("refused", "invalid"))
    return "\n\n".join((
        table(("relation", "drawn", *columns), [*relations, row("all", results)]),
        table(("element", "drawn", *columns), [row(name, found) for name, found in sorted(named.items())]),
        "\n".join(f"{count:4} {line}" for line, count in lines.most_common()),
    ))  # fmt: skip


def _judge_all(programs: list[dict], folder: Path, jobs: int, timeout_seconds: float) -> Iterator[Result]:
    """Yields results as they come, of some programs at once, each in processes of its own."""
    idle = [Children(Path(tempfile.mkdtemp(dir=folder)), timeout_seconds) for _ in range(jobs)]

    def judge_here(program: dict) -> Result:
        children = idle.pop()
        try:
            return judge(program, children)
        finally:
            idle.append(children)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for done in concurrent.futures.as_completed([pool.submit(judge_here, each) for each in programs]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for children in idle:
                children.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:20", help="such as 3,7,10:20, without the last one [0:20]")
    parser.add_argument("--kinds", default="", help="compiled, own_step, trainer [all]")
    parser.add_argument("--relations", default="", help=f"{', '.join(RELATIONS)} [all but workers and servers]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="programs at once [one per core]")
    parser.add_argument("--timeout_seconds", type=float, default=120, help="of each side [120]")
    parser.add_argument("--results", type=Path, help="a file of a line of JSON per seed, which a later call continues")
    parser.add_argument("--print", action="store_true", help="print the scripts, and run nothing")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="shrink what is wrong")
    args = parser.parse_args()
    kinds, relations = (tuple(filter(None, each.split(","))) for each in (args.kinds, args.relations))
    parts = [[int(number) for number in part.split(":")] for part in args.seeds.split(",")]
    seeds = [seed for first, *end in parts for seed in range(first, *(end or [first + 1]))]
    programs = [program_from_seed(seed, kinds, relations) for seed in seeds]
    if args.print:
        print(*(script(program, RELATIONS[program["relation"]].sides(program)) for program in programs), sep="\n")
        return 0
    results = []
    if args.results and args.results.exists():
        results = [Result(json.loads(line)) for line in args.results.read_text("utf-8").splitlines()]
        results = [each for each in results if each["program"] in programs]
        programs = [each for each in programs if each not in [result["program"] for result in results]]
    with tempfile.TemporaryDirectory(prefix="crankshaft-programs-") as folder:
        for result in _judge_all(programs, Path(folder), args.jobs, args.timeout_seconds):
            results.append(result)
            program = result["program"]
            where = f"{program['seed']}: {program['kind']}, {program['relation']}"
            print(f"{where}: {result['outcome']} {result['line']} ({result['seconds']} s)", flush=True)
            if args.results:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
        if args.shrink:
            children = Children(Path(folder), args.timeout_seconds)
            for result in (each for each in results if each.is_wrong):
                program = shrunk(result["program"], children)
                print(script(program, RELATIONS[program["relation"]].sides(program)), flush=True)
            children.close()
    print(summary(results))
    return 1 if any(each.is_wrong for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
