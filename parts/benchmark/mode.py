"""Executes `--mode=benchmark` on an assembled run.

Every process of a strategy calls the same functions in the same order.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints import RunDir
from ...runner.base import BaseRun
from ...runner.jit import choose_jit
from ...runner.modes.outcome import Outcome, run_result
from ..launchers import children
from ..plan import cost, measured_limits
from ..plan.traced_ops import NotCountableError
from . import benchmark_report, result
from .measure import intervals, rounds, trace

_TOP_OPS = 10


def benchmark(run: BaseRun) -> Outcome:
    """Times the training loop, from new weights.

    The run_dir is neither read nor changed, except that profile=true adds a trace.
    """
    config = run.config
    work = result.configured_work(config)
    measured = _measure(run, os.environ)
    content = {**result.heading(config.global_batch_size), **run_result(run), **work, **measured}
    if not config.is_chief:
        return Outcome(content)
    if config.baseline:
        theirs = result.read_baseline(config.baseline)
        content["baseline"] = {"path": config.baseline, **intervals.compare([content], [theirs])}
        content["warnings"] += result.warnings(content, theirs)
    fail_below = config.arguments("benchmark_arg")["fail_below"]
    code = result.exit_code(content["baseline"], fail_below) if config.baseline else 0
    return Outcome(content, code, report=benchmark_report.text(content))


def _measure(run: BaseRun, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures the rate, its upper limit, and with profile=true the time per op."""
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
    limits, why_no_limits = _limits(run, measured["steps_per_sec"])
    return measured | limits | {"warnings": [*measured["warnings"], *why_no_limits]}


def _line(number: int, count: int, totals: Mapping[str, Any]) -> str:
    steps, examples = (benchmark_report.number(totals[f"{name}_per_sec"]) for name in ("steps", "examples"))
    rates = f"{steps} steps/s  {examples} examples/s"
    return f"round {number} of {count}  {totals['steps']:,} steps in {totals['wall_seconds']:.2f} s  {rates}"


def _limits(run: BaseRun, steps_per_sec: float) -> tuple[dict[str, Any], list[str]]:
    """Measures flops_per_step, bytes_per_step, flops_source, machine, roofline (None if unknown), and the reasons."""
    limits: dict[str, Any] = dict.fromkeys(("flops_per_step", "bytes_per_step", "flops_source", "machine", "roofline"))
    config, strategy = run.config, run.strategy
    if config.strategy == "tpu":
        return limits, ["the limits of TPUs were not measured"]
    run.log("measuring the machine's limits")
    device, shared_by = strategy.computes_on
    limits["machine"] = measured_limits.probe(device, tuple(dict.fromkeys(("float32", "bfloat16", config.precision))))
    try:
        step = cost.step_cost(strategy, run.state, config.global_batch_size)
    except NotCountableError as error:
        return limits, [f"a step's operations could not be counted: {error}"]
    limits |= {"flops_per_step": sum(step.flops.values()), "bytes_per_step": step.bytes, "flops_source": cost.SOURCE}
    limits["roofline"] = cost.roofline(step, limits["machine"], steps_per_sec, shared_by)
    if limits["roofline"] is None:
        return limits, ["the step has no matrix products or convolutions to hold against the machine's peak"]
    return limits, []
