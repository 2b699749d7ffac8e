"""Finds what bounds a run's steps: what a step computes and moves, held against what the machine reaches."""

from __future__ import annotations

from typing import Any

from ...runner.base import BaseRun
from . import cost, measured_limits
from .traced_ops import NotCountableError


def step_limits(run: BaseRun, steps_per_sec: float) -> tuple[dict[str, Any], list[str]]:
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
