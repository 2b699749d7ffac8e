"""The work of `--mode=benchmark` in the process that measures, with everything put together already. Host code."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
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
from .measure.pages import Pages


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
        pages = _pages(session)
        measured = rounds.run(
            session.strategy,
            session.state,
            length,
            variables,
            watcher=_preparing(pages, live.watcher) if pages else live.watcher,
            processes=lambda: guard.job_of(variables),
        )
        measured["input_files"] = pages and {"asked": config.benchmark_files, "share_in_memory": pages.in_memory}
        measured["warnings"] += _warnings_of(session, pages, measured) if pages else []
        for name in ("compile_seconds", "first_step_seconds"):  # a user waits for the choice of jit too
            measured[name] += choosing_seconds
        return measured | _beside(breakdown, config, measured)


def _pages(session: Session) -> Pages | None:
    """Returns the pages of the files that the measured part reads; None where it reads none.

    Raises:
      UsageError: their state was asked for, and there are none.
    """
    state, paths = session.config.benchmark_files, [path for path in session.files if os.path.isfile(path)]
    if paths and session.config.benchmark_part in ("whole", "input", "all"):
        return Pages(paths, state)
    if state != "as_found":
        where = "its source names no local files"
        if session.strategy.train_feed.bytes_read is None:
            where = "it is kept in memory, or is no source; --resident_data_mb=0 has a source read as steps go"
        raise UsageError(f"--benchmark_files={state} is of data that steps read from files: {where}")
    return None


def _preparing(pages: Pages, watcher: rounds.Watcher) -> rounds.Watcher:
    """Returns a watcher that brings the pages into their state before each round."""

    def at_round(done: Sequence[dict], steps: int) -> None:
        pages.before_round()
        watcher.at_round(done, steps)

    return watcher._replace(at_round=at_round)


def _warnings_of(session: Session, pages: Pages, measured: Mapping[str, Any]) -> list[str]:
    """Returns why the files' state was not what was asked for, a line each."""
    state, share = session.config.benchmark_files, pages.in_memory
    found, epoch = [], session.strategy.train_order.steps_per_epoch
    if share is not None and ((state == "cold" and share > 0.05) or (state == "warm" and share < 0.95)):
        found.append(f"{state} files: {share:.0%} of them were in memory as the first round began")
    longest = max(each["steps"] for each in measured["rounds"])
    if state == "cold" and longest > epoch:
        found.append(
            f"cold files: a round of {longest:,} steps read them {longest / epoch:.1f} times, the first time cold; use "
            f"--benchmark_steps={epoch} at most"
        )
    return found


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
