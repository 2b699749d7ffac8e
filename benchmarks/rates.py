"""Two checkouts' rates, in pieces that take turns: whether a change is as fast as what was before it.

    git worktree add ../before/crankshaft $(git merge-base HEAD origin/main)
    python -m benchmarks.rates --before=../before/crankshaft --workload=mlp --turns=40 -- --jit=on

Each checkout's `bare.py` makes a run as `crankshaft train` does and stays; what is timed are calls of the inner
loop and nothing around them. On a machine whose rate changes by a third within seconds that tells 2 % apart, where
`pairs`, whose runs come one after the other, does not. What stands after `--` are more flags
of `crankshaft train`, for both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .children import Process
from .race import ROOT, run_script
from .turns import add_turns, compare
from .workloads import BATCH_SIZE, WORKLOADS

STEPS = {
    "mlp": 1000,
    "wide": 50,
    "cnn": 50,
    "resnet20": 25,
    "wide_deep": 500,
}  # of a piece: a quarter of a second, about


def peer(checkout: Path, folder: Path, flags: list[str]) -> Process:
    """The checkout's own program; `folder` is where its package is to be found."""
    folder.mkdir()
    (folder / "crankshaft").symlink_to(checkout)  # a package is found by its folder's name
    scripts = [
        path for path in (checkout / "benchmarks", checkout / "tests/benchmarks") if (path / "bare.py").is_file()
    ]
    if not scripts:
        raise SystemExit(f"error: {checkout} has no benchmarks/bare.py; name a checkout of Crankshaft")
    (folder / "benchmarks").symlink_to(scripts[0])
    # Without the second, Python would look into this folder, whose benchmarks may be another checkout's, first.
    variables = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return Process([sys.executable, "-m", "benchmarks.bare", *flags], variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="the other one [this one]")
    parser.add_argument("--workload", choices=STEPS, default="mlp")
    parser.add_argument("flags", nargs="*", help="after --, of crankshaft train, such as --jit=on [--jit=off]")
    add_turns(parser, 40)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    flags = [*workload.flags, f"--global_batch_size={BATCH_SIZE}", "--jit=off", *args.flags]
    with tempfile.TemporaryDirectory(prefix="crankshaft-rates-") as folder:
        checkouts = {"before": args.before.resolve(), "after": args.after.resolve()}
        peers = {name: peer(path, Path(folder, name), flags) for name, path in checkouts.items()}
        compare(workload.title, peers, STEPS[args.workload], args.turns)


if __name__ == "__main__":
    run_script(main)
