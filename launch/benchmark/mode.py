"""The work of `--mode=benchmark` in the process that measures, with everything put together already. Host code.

Every process of a strategy calls the same functions in the same order.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints import RunDir
from ...engine.strategies.base import Measured
from ..cluster import children
from ..command_line.config import Config
from ..errors import UsageError
from ..run import modes
from ..run.session import Session, choose_jit
from . import report, result
from .measure import cost, intervals, machine, parts, rounds, trace

_PART_SECONDS = 1.5  # of each part where all are timed
_SUMS_SECONDS = 0.5  # of sums over replicas where they are timed beside the whole
_TOP_OPS = 10


def benchmark(session: Session, variables: Mapping[str, str]) -> tuple[dict[str, Any], int, str]:
    """Times the training loop or a part of it, from new weights; returns (result, exit code, report to print).

    Nothing of the run_dir is read or changed, except that --profile adds a trace.
    """
    config, strategy = session.config, session.strategy
    if not isinstance(strategy, Measured):
        raise UsageError(
            f"--strategy={config.strategy} can't be taken apart: {type(strategy).__name__} is not an "
            "engine.strategies.base.Measured, which benchmark mode needs; train with it, or make it one"
        )
    work = result.work_asked(config)
    measured = _measure(session, variables)
    content = {**result.heading(config.global_batch_size), **modes.result_of(session), **work, **measured}
    if not config.is_chief:
        return content, 0, ""
    if config.baseline:
        theirs = result.read_baseline(config.baseline)
        content["baseline"] = {"path": config.baseline, **intervals.compare([content], [theirs])}
        content["warnings"] += result.warnings(content, theirs)
    code = result.exit_code(content["baseline"], config.fail_below) if config.baseline else 0
    return content, code, report.text(content)


def _measure(session: Session, variables: Mapping[str, str]) -> dict[str, Any]:
    """Measures the rate of what --benchmark_part names, and what belongs beside it."""
    config, part = session.config, session.config.benchmark_part
    session.say("warm-up")
    before = time.perf_counter()
    session.say(choose_jit(session))
    choosing_seconds = time.perf_counter() - before
    breakdown = Breakdown(session)
    if part == "checkpoint":  # it is not made of steps, so it has no rate
        return {"parts": {part: breakdown.checkpoint()}, "warnings": breakdown.warnings}
    if part not in ("whole", "all"):
        breakdown.part(part).bind(session.strategy, session.state)
    measured = rounds.run(
        session.strategy,
        session.state,
        rounds.Length(config.benchmark_steps, config.benchmark_seconds, config.benchmark_rounds),
        variables,
        at_round=lambda number, totals: session.say(_line(number, config.benchmark_rounds, totals)),
        processes=lambda: children.job_of(variables),
    )
    for name in ("compile_seconds", "first_step_seconds"):  # a user waits for the choice of jit too
        measured[name] += choosing_seconds
    return measured | _beside(breakdown, config, measured)


def _line(number: int, count: int, totals: Mapping[str, Any]) -> str:
    rates = f"{report.number(totals['steps_per_sec'])} steps/s  {report.number(totals['examples_per_sec'])} examples/s"
    return f"round {number} of {count}  {totals['steps']:,} steps in {totals['wall_seconds']:.2f} s  {rates}"


def _beside(breakdown: Breakdown, config: Config, measured: dict[str, Any]) -> dict[str, Any]:
    """Measures what a rate is made of, and how far it is from the machine's limits."""
    figures: dict[str, Any] = {}
    part = config.benchmark_part
    if config.profile:
        figures["profile"] = breakdown.profile()
    if part == "all":
        figures["parts"] = breakdown.parts()
    elif part != "whole":
        figures["parts"] = {part: breakdown.figures(part, parts.summary(measured["rounds"]))}
    if part in ("whole", "all") and measured["reduce_fraction"] is None:
        timed = figures.get("parts", {}).get("reduce")
        figures["reduce_fraction"] = breakdown.reduce_fraction(measured["steps_per_sec"], timed)
    if part in ("whole", "all", "step"):
        figures |= breakdown.limits(measured["steps_per_sec"])
    return {**figures, "warnings": [*measured["warnings"], *breakdown.warnings]}


class Breakdown:
    """Measures more about a session whose whole loop was, or is to be, timed: a step's parts, its ops, the limits.

    Args:
      session: put together, with its jit chosen.

    Attributes:
      warnings: why a figure could not be measured, a line each.
    """

    def __init__(self, session: Session):
        self.warnings: list[str] = []
        self._session = session
        self._strategy, self._state = session.strategy, session.state
        self._feed = session.strategy.train_feed
        self._jit = bool(session.state.jit) and not session.strategy.without_jit

    def part(self, name: str) -> parts.Part:
        """Returns the loop that does one part of a step alone: step, input, reduce or update."""
        make = (parts.whole, parts.step, parts.own_step, parts.input, parts.reduce, parts.update)
        return {each.__name__: each for each in make}[name](self._strategy, self._state, self._feed, self._jit)

    def figures(self, name: str, timed: dict[str, Any]) -> dict[str, Any]:
        """Returns a part's figures from its time."""
        if name == "input":
            return timed | {"examples_per_sec": 1e3 * self._feed.order.batch_size / timed["ms_per_step"]}
        if name != "reduce":
            return timed
        with self._state.kept():
            return timed | parts.figures_of_sums(self._strategy, self._state, self._feed, timed["ms_per_step"])

    def parts(self) -> dict[str, Any]:
        """Returns all parts' figures, timed in turn with the whole, and the `shares` that they have of it."""
        names = ["whole", "step", "input", "reduce", "update"]
        if reason := parts.without_sums(self._strategy, self._state):
            self.warnings.append(f"reduce was not timed: {reason}")
            names.remove("reduce")
        if self._strategy.mesh.is_cut:
            names.append("own_step")
        timed = self._timed(names, _PART_SECONDS)
        figures = {name: self.figures(name, each) for name, each in timed.items()}
        figures = {**dict.fromkeys(("whole", "step", "input", "reduce", "update")), **figures}
        return {**figures, "checkpoint": self.checkpoint(), "shares": parts.shares(figures)}

    def reduce_fraction(self, steps_per_sec: float, timed: dict[str, Any] | None) -> float | None:
        """Returns the share of the whole's time that its sums over replicas take alone, 1 at most; None without sums.

        `timed` is that part, if it was timed already.
        """
        if parts.without_sums(self._strategy, self._state):
            return None
        timed = timed or self._timed(["reduce"], _SUMS_SECONDS)["reduce"]
        return min(1.0, 1e-3 * timed["ms_per_step"] * steps_per_sec)

    def _timed(self, names: list[str], seconds: float) -> dict[str, dict]:
        self._session.say(f"timing in turn: {', '.join(names)}")
        with self._state.kept():
            return parts.timed(self._strategy, self._state, {name: self.part(name) for name in names}, seconds)

    def checkpoint(self) -> dict[str, Any]:
        """Times writing, restoring, and what training loses meanwhile; does not touch the run_dir."""
        self._session.say("timing checkpoints")
        with self._state.kept(), tempfile.TemporaryDirectory(prefix="crankshaft-checkpoint-") as folder:
            folder = self._strategy.exchange_text(folder)[0]
            return parts.checkpoint(self._strategy, self._state, self.part("step"), folder)

    def limits(self, steps_per_sec: float) -> dict[str, Any]:
        """Returns flops_per_step, bytes_per_step, flops_source, machine, roofline.

        Each is None where it can't be measured, and a warning says why.
        """
        limits = dict.fromkeys(("flops_per_step", "bytes_per_step", "flops_source", "machine", "roofline"))
        if self._session.config.strategy == "tpu":
            self.warnings.append("the limits of TPUs were not measured")
            return limits
        self._session.say("measuring the machine's limits")
        device, shared_by = self._strategy.computes_on
        dtypes = dict.fromkeys(("float32", "bfloat16", self._session.config.precision))
        limits["machine"] = machine.probe(device, tuple(dtypes))
        try:
            step = cost.of_step(self._strategy, self._state, self._session.config.global_batch_size)
        except cost.NotCountableError as error:
            self.warnings.append(f"a step's operations could not be counted: {error}")
            return limits
        limits |= {"flops_per_step": step.total_flops, "bytes_per_step": step.bytes, "flops_source": cost.SOURCE}
        limits["roofline"] = cost.roofline(step, limits["machine"], steps_per_sec, shared_by)
        if limits["roofline"] is None:
            self.warnings.append("the step has no matrix products or convolutions to hold against the machine's peak")
        return limits

    def profile(self) -> dict[str, Any] | None:
        """Traces ten steps of what is bound now; returns the trace and the ten ops that took longest."""
        run_dir = self._session.config.run_dir
        folder = RunDir(run_dir).tensorboard if run_dir else tempfile.mkdtemp(prefix="crankshaft-profile-")
        self._session.say(f"profiling {trace.STEPS} steps")
        try:
            profile = trace.profile(self._strategy, self._state, folder)
        except trace.NoTraceError as error:
            self.warnings.append(f"there is no profile: {error}")
            return None
        return profile and {**profile, "ops": profile["ops"][:_TOP_OPS]}
