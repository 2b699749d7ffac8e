"""Breaks a benchmark's rate down: the machine's limits, a step's parts, its ops.

Host code, in the process that measures; every process of a strategy calls the same functions in the same order.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from ..run.session import Session
from .measure import checkpointing, communication, cost, machine, parts, roofline, trace
from .measure.parts import Part

_PART_SECONDS = 1.5  # of each part where all are timed
_SETTING_SECONDS = 0.5  # of each dtype and pack of the reduction
_TOP_OPS = 10


class Breakdown:
    """Measures more about a session whose whole loop was, or is to be, timed.

    Args:
      session: put together, with its jit chosen.
      tell: called with a line before each measurement.

    Attributes:
      warnings: why a figure could not be measured, a line each.
    """

    def __init__(self, session: Session, tell: Callable[[str], None] = lambda line: None):
        self.warnings: list[str] = []
        self._session = session
        self._tell = tell
        self._strategy, self._state = session.strategy, session.state
        self._feed = session.strategy.train_feed
        self._jit = bool(session.state.jit) and not session.strategy.without_jit

    def bind(self, name: str) -> None:
        """Makes the strategy's steps do one part alone: step, input, reduce or update."""
        self._part(name).bind(self._strategy, self._state)

    def figures(self, name: str, timed: dict[str, Any]) -> dict[str, Any]:
        """Returns a part's figures from its time."""
        if name == "input":
            return timed | {"examples_per_sec": 1e3 * self._feed.order.batch_size / timed["ms_per_step"]}
        if name != "reduce":
            return timed
        trainer, replicas = self._state.trainer, self._strategy.num_replicas
        variables = parts.dense_variables(trainer)
        rates = communication.figures(trainer.reduction, variables, replicas, timed["ms_per_step"])
        with self._state.kept():
            return {**timed, **rates, **communication.forms(self._strategy, self._state, self._feed, _SETTING_SECONDS)}

    def parts(self) -> dict[str, Any]:
        """Returns all parts' figures, timed in turn with the whole, and the `shares` that they have of it."""
        names = ["whole", "step", "input", "reduce", "update"]
        if reason := communication.why_not(self._strategy, self._state):
            self.warnings.append(f"reduce was not timed: {reason}")
            names.remove("reduce")
        if self._strategy.mesh.is_cut:
            names.append("own_step")
        self._tell(f"timing in turn: {', '.join(names)}")
        with self._state.kept():
            made = {name: self._part(name) for name in names}
            timed = parts.timed(self._strategy, self._state, made, _PART_SECONDS)
        found = {name: self.figures(name, each) for name, each in timed.items()}
        found = {**dict.fromkeys(("whole", "step", "input", "reduce", "update")), **found}
        return {**found, "checkpoint": self.checkpoint(), "shares": parts.shares(found)}

    def reduce_fraction(self, steps_per_sec: float, timed: dict[str, Any] | None) -> float | None:
        """Returns the share of the whole's time that its sums over replicas take alone, 1 at most; None without sums.

        `timed` is that part, if it was timed already.
        """
        if communication.why_not(self._strategy, self._state):
            return None
        if timed is None:
            self._tell("timing sums over replicas")
            with self._state.kept():
                made = {"reduce": self._part("reduce")}
                timed = parts.timed(self._strategy, self._state, made, _SETTING_SECONDS)["reduce"]
        return min(1.0, 1e-3 * timed["ms_per_step"] * steps_per_sec)

    def checkpoint(self) -> dict[str, Any]:
        """Times writing, restoring, and what training loses meanwhile; does not touch the run_dir."""
        self._tell("timing checkpoints")
        with self._state.kept(), tempfile.TemporaryDirectory(prefix="crankshaft-checkpoint-") as folder:
            folder = self._strategy.exchange_text(folder)[0]
            return checkpointing.checkpoint(self._strategy, self._state, self._part("step"), folder)

    def _part(self, name: str) -> Part:
        if name == "reduce":
            return communication.reduce(self._strategy, self._state, self._feed)
        makers = (parts.whole, parts.step, parts.own_step, parts.input, parts.update)
        make = {maker.__name__: maker for maker in makers}[name]
        return make(self._strategy, self._state, self._feed, self._jit)

    def limits(self, steps_per_sec: float) -> dict[str, Any]:
        """Returns flops_per_step, bytes_per_step, flops_source, machine, roofline.

        Each is None where it can't be measured, and a warning says why.
        """
        found = dict.fromkeys(("flops_per_step", "bytes_per_step", "flops_source", "machine", "roofline"))
        if self._session.config.strategy == "tpu":
            self.warnings.append("the limits of TPUs were not measured")
            return found
        self._tell("measuring the machine's limits")
        device, shared_by = self._strategy.computes_on
        dtypes = dict.fromkeys(("float32", "bfloat16", self._session.config.precision))
        found["machine"] = machine.probe(device, tuple(dtypes))
        try:
            step = cost.of_step(self._strategy, self._state, self._session.config.global_batch_size)
        except cost.NotCountableError as error:
            self.warnings.append(f"a step's operations could not be counted: {error}")
            return found
        found |= {"flops_per_step": step.total_flops, "bytes_per_step": step.bytes, "flops_source": cost.SOURCE}
        found["roofline"] = roofline.describe(step, found["machine"], steps_per_sec, shared_by)
        if found["roofline"] is None:
            self.warnings.append("the step has no matrix products or convolutions to hold against the machine's peak")
        return found

    def profile(self) -> dict[str, Any] | None:
        """Traces ten steps of what is bound now; returns the trace and the ten ops that took longest."""
        run_dir = self._session.config.run_dir
        folder = os.path.join(run_dir, "tensorboard") if run_dir else tempfile.mkdtemp(prefix="crankshaft-profile-")
        self._tell(f"profiling {trace.STEPS} steps")
        try:
            found = trace.profile(self._strategy, self._state, folder)
        except trace.NoTraceError as error:
            self.warnings.append(f"there is no profile: {error}")
            return None
        return found and {**found, "ops": found["ops"][:_TOP_OPS]}
