"""Executes `--mode=benchmark` on an assembled run.

Every process of a strategy calls the same functions in the same order.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...engine.checkpoints import RunDir
from ...engine.errors import rounded
from ...runner.base import BaseRun
from ...runner.jit import choose_jit
from ...runner.modes.outcome import Outcome, run_result
from ..launchers import children
from . import result
from .measure import intervals, rounds, trace

_TOP_OPS = 10


_Limits = Callable[[BaseRun, float], tuple[dict[str, Any], list[str]]]


def benchmark(run: BaseRun, limits: _Limits, text: Callable[[Mapping[str, Any]], str]) -> Outcome:
    """Times the training loop, from new weights.

    The run_dir is neither read nor changed, except that profile=true adds a trace.

    Args:
      limits: a function of the run and its steps per second, which returns what bounds them, and lines on what it could
        not find; see `crankshaft.parts.plan.limits`.
      text: a function that formats a result.
    """
    config = run.config
    work = result.configured_work(config)
    measured = _measure(run, os.environ)
    bounds, why_unknown = limits(run, measured["steps_per_sec"])
    measured |= {**bounds, "warnings": [*measured["warnings"], *why_unknown]}
    content = {**result.heading(config.global_batch_size), **run_result(run), **work, **measured}
    if not config.is_chief:
        return Outcome(content)
    if config.baseline:
        theirs = result.read_baseline(config.baseline)
        content["baseline"] = {"path": config.baseline, **intervals.compare([content], [theirs])}
        content["warnings"] += result.warnings(content, theirs)
    fail_below = config.arguments("benchmark_arg")["fail_below"]
    code = result.exit_code(content["baseline"], fail_below) if config.baseline else 0
    return Outcome(content, code, report=text(content))


def _measure(run: BaseRun, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures the rate, and with profile=true the time per op."""
    arguments = run.config.arguments("benchmark_arg")
    run.log("warm-up")
    before = time.perf_counter()
    run.log(choose_jit(run, None))  # a rate is that of a long run
    choosing_seconds = time.perf_counter() - before
    measured = rounds.run(
        run.strategy,
        run.strategy.training,
        rounds.Length(arguments["steps"], arguments["seconds"] or 3.0, arguments["rounds"]),
        variables,
        at_round=lambda number, totals: run.log(_line(number, arguments["rounds"], totals)),
        processes=lambda: children.job_processes(variables),
    )
    for name in ("compile_seconds", "first_step_seconds"):  # with the choice of jit, for which a user waits too
        measured[name] += choosing_seconds
    if arguments["profile"]:
        run_dir, profile = run.config.run_dir, None
        folder = RunDir(run_dir).tensorboard if run_dir else tempfile.mkdtemp(prefix="crankshaft-profile-")
        run.log(f"profiling {trace.STEPS} steps")
        try:
            profile = trace.profile(run.strategy, folder)  # None in other processes than the chief
        except trace.NoTraceError as error:
            measured["warnings"].append(f"no profile: {error}")
        measured["profile"] = profile and {**profile, "ops": profile["ops"][:_TOP_OPS]}
    return measured


def _line(number: int, count: int, totals: Mapping[str, Any]) -> str:
    steps, examples = (rounded(totals[f"{name}_per_sec"]) for name in ("steps", "examples"))
    rates = f"{steps} steps/s  {examples} examples/s"
    return f"round {number} of {count}  {totals['steps']:,} steps in {totals['wall_seconds']:.2f} s  {rates}"
