"""Nothing but calls of the inner loop, for comparisons: a run as `crankshaft train` makes it, and its rate.

As a program it is a peer that takes turns (`peer.py`): `python -m benchmarks.bare` with flags of launch.train.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence

from crankshaft.engine.hooks import Hook
from crankshaft.engine.loop import Loop
from crankshaft.engine.machine import allocator
from crankshaft.engine.strategies.base import Program
from crankshaft.launch import program
from crankshaft.launch.composition import building
from crankshaft.launch.composition.open_run import Run
from crankshaft.runner.command_line import parsing
from crankshaft.runner.data.loading import load
from crankshaft.runner.host import process
from crankshaft.runner.jit import choose_jit


def tune() -> None:
    """What every run does before TensorFlow starts."""
    process.prepare(tunes_allocator=True)
    logging.getLogger("crankshaft").setLevel(logging.ERROR)


def make(run_dir: str, *more: str) -> Run:
    """A run in a run_dir of its own; `more` are flags of launch.train."""
    words = ["--mode=train", f"--run_dir={run_dir}", "--train_steps=1000000000", "--progress=plain", *more]
    configuration = program.configure(parsing.from_argv(["bare", *words]), None, False, os.environ)
    program.check(configuration)
    strategy = building.make_strategy(configuration)
    allocator.keep_freed_memory_with_tensorflow()
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for answers (`peer.py`)
        made = building.build_run(configuration, load(configuration), strategy)
        print(choose_jit(made, None))
    return made


def rate(made: Run, steps: int, program: Program | None = None) -> float:
    """Steps a second of `steps` more steps, one or more, with nothing around them, until the device is done.

    They are a program's; None is that of the run's training.
    """
    program = program or made.strategy.training
    began, end = time.perf_counter(), program.step + steps
    while program.step < end:
        result = made.strategy.run(program, end - program.step)
    result.sums.read()
    return steps / (time.perf_counter() - began)


def train(made: Run, hooks: Sequence[Hook], steps: int) -> None:
    """Trains so many more steps by the outer loop, with these hooks alone."""
    loop = Loop(made.strategy, made.state, hooks, made.state.step + steps)
    loop.begin()
    loop.train_to(made.state.step + steps)
    loop.end()


def main() -> None:
    from .peer import take_turns

    tune()
    with tempfile.TemporaryDirectory() as run_dir:
        made = make(run_dir, *sys.argv[1:])
        take_turns(lambda steps: rate(made, steps))


if __name__ == "__main__":
    main()
