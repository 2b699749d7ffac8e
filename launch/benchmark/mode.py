"""The work of `--mode=benchmark` in the process that measures, with everything put together already. Host code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...engine.strategies.base import Measured
from ..cluster import guard
from ..command_line.config import Config
from ..errors import UsageError
from ..run import modes
from ..run.session import Session, choose_jit
from . import baseline, schema, table
from .breakdown import Breakdown
from .compare import compare, exit_code
from .live import Live
from .measure import parts, rounds
from .measure.length import Length


def benchmark(session: Session, variables: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """Times the training loop or a part of it, from new weights.

    Nothing of the run_dir is read or changed, except that --profile adds a trace.
    """
    config, strategy = session.config, session.strategy
    if not isinstance(strategy, Measured):
        raise UsageError(
            f"--strategy={config.strategy} can't be taken apart: {type(strategy).__name__} is no "
            "engine.strategies.base.Measured, which benchmark mode needs; train with it, or make it one"
        )
    work = baseline.work_asked(config)
    measured = _measure(session, variables)
    result = {**schema.heading(config.global_batch_size), **modes.result_of(session), **work, **measured}
    code = 0
    if config.is_chief and config.baseline:
        theirs = baseline.read(config.baseline)
        result["baseline"] = {"path": config.baseline, **compare([result], [theirs])}
        result["warnings"] += baseline.warnings(result, theirs)
    if config.is_chief:
        table.print_benchmark(result)
        if config.baseline:
            code = exit_code(result["baseline"], config.fail_below)
    return result, code


def _measure(session: Session, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures the rate of what --benchmark_part names, and what belongs beside it."""
    config, part = session.config, session.config.benchmark_part
    length = Length(config.benchmark_steps, config.benchmark_seconds, config.benchmark_rounds)
    with Live(config.progress if config.is_chief else "off", length.rounds) as live:
        live.stage("warm-up")
        before = time.perf_counter()
        session.say(choose_jit(session))
        choosing_seconds = time.perf_counter() - before
        breakdown = Breakdown(session, live.stage)
        if part == "checkpoint":  # it is not made of steps, so it has no rate
            return {"parts": {part: breakdown.checkpoint()}, "warnings": breakdown.warnings}
        if part not in ("whole", "all"):
            breakdown.bind(part)
        measured = rounds.run(
            session.strategy,
            session.state,
            length,
            variables,
            watcher=live.watcher,
            processes=lambda: guard.job_of(variables),
        )
        for name in ("compile_seconds", "first_step_seconds"):  # a user waits for the choice of jit too
            measured[name] += choosing_seconds
        return measured | _beside(breakdown, config, measured)


def _beside(breakdown: Breakdown, config: Config, measured: dict[str, Any]) -> dict[str, Any]:
    """Measures what a rate is made of, and how far it is from the machine's limits."""
    found: dict[str, Any] = {}
    part = config.benchmark_part
    if config.profile:
        found["profile"] = breakdown.profile()
    if part == "all":
        found["parts"] = breakdown.parts()
    elif part != "whole":
        found["parts"] = {part: breakdown.figures(part, parts.summary(measured["rounds"]))}
    if part in ("whole", "all") and measured["reduce_fraction"] is None:
        timed = found.get("parts", {}).get("reduce")
        found["reduce_fraction"] = breakdown.reduce_fraction(measured["steps_per_sec"], timed)
    if part in ("whole", "all", "step"):
        found |= breakdown.limits(measured["steps_per_sec"])
    return {**found, "warnings": [*measured["warnings"], *breakdown.warnings]}
