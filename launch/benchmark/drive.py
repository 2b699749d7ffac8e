"""Runs `--mode=benchmark` several times: a sweep, numbers of replicas, turns with another command.

Host code; this process measures nothing and does not start TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from absl.testing import flagsaver

from .. import errors
from ..command_line import checks, paths, uses
from ..command_line import config as configs
from ..command_line.flags import USES
from ..errors import UsageError
from ..host import explanations
from ..run import results
from . import program as programs
from . import scaling, schema, sweep, table, turns
from .children import Stopped, stoppable
from .program import Program
from .series import Series

_DRIVERS = {"benchmark_sweep": sweep.run, "benchmark_replicas": scaling.run, "baseline_cmd": turns.run}


def is_asked_for() -> bool:
    """Returns whether the flags, which have been parsed, ask for several runs."""
    return any(flags.FLAGS[name].value for name in _DRIVERS)


def run_train(argv: Sequence[str], trainer_class: type | None, has_data: bool) -> int:
    """Runs crankshaft train, or a script that calls its `main`, several times.

    Returns the exit code. Raises `UsageError`.
    """
    strategy = flags.FLAGS.strategy
    if "TF_CONFIG" in os.environ and strategy in ("multi_worker", "parameter_server"):
        raise UsageError(
            f"--{_driver()} starts --strategy={strategy} itself, on one machine, and TF_CONFIG makes this process a "
            "part of a cluster; use crankshaft local, or unset TF_CONFIG"
        )

    def check(environment: Mapping[str, str]) -> None:
        checks.check(configs.from_flags(trainer_class, has_data, environment))

    return run(programs.of_this_process(argv, check))


def run_local(
    start: tuple[str, ...], cluster: Sequence[str], tasks: Mapping[str, int], unknown: tuple[str, ...]
) -> int:
    """Runs what crankshaft local was asked to, several times. Returns the exit code; raises `UsageError`.

    Args:
      start: as in `Program`.
      cluster: crankshaft local's own flags.
      tasks: how many it starts of each type.
      unknown: arguments that only the script knows.
    """

    def check(environment: Mapping[str, str]) -> None:
        if start != programs.TRAIN:
            return  # only the script knows what it trains, and on what
        with flagsaver.flagsaver(strategy="parameter_server" if "ps" in tasks else "multi_worker"):
            checks.check(configs.from_flags(None, False, environment))

    return run(Program(start, check, tuple(cluster), tasks, unknown))


def run(program: Program) -> int:
    """Does what the flags ask for, prints and writes the result. Returns the exit code; raises `UsageError`."""
    values = flags.FLAGS.flag_values_dict()
    paths.check(values)
    paths.check_results(values)
    result, code = _measure(_DRIVERS[_driver()], program)
    if result is None:
        return code
    heading = schema.heading(result.pop("global_batch_size", flags.FLAGS.global_batch_size))
    result = {**heading, **{name: value for name, value in result.items() if name not in heading}}
    table.print_benchmark(result)
    try:  # each run has its own line in --result_jsonl already
        results.write(result, {**values, "result_jsonl": None})
    except OSError as error:
        return errors.fail(*explanations.explain(error))
    if "baseline" in result and not code:
        from .compare import exit_code

        code = exit_code(result["baseline"], flags.FLAGS.fail_below)
    return code


def _driver() -> str:
    """Returns the name of the flag that asks for several runs."""
    asked = [name for name in _DRIVERS if flags.FLAGS[name].value]
    asked += [name for name in ("baseline",) if flags.FLAGS[name].value]
    if len(asked) > 1:
        raise UsageError(f"--{asked[0]} and --{asked[1]} are both given; use one of them")
    uses.check({asked[0]: USES[asked[0]]}, flags.FLAGS.flag_values_dict())
    if flags.FLAGS.benchmark_part == "checkpoint":
        raise UsageError(
            f"--{asked[0]} compares rates of steps, and --benchmark_part=checkpoint has none; leave it out"
        )
    return asked[0]


def _measure(driver: Callable, program: Program) -> tuple[dict[str, Any], int]:
    def series(count: int) -> Series:
        return Series(count, os.environ, quiet=flags.FLAGS.progress == "off")

    try:
        with stoppable():
            return driver(program, series)
    except Stopped as stopped:  # while it summed up
        return None, stopped.code
