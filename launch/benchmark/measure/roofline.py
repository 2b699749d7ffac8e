"""The roofline: the rate that a machine's measured limits allow a model, and how far below it a run is. Host code.

Williams, Waterman and Patterson 2009, Roofline: an insightful visual performance model for multicore architectures
(https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

from .cost import Cost


def describe(cost: Cost, machine: dict, steps_per_sec: float, devices: int = 1) -> dict | None:
    """Computes which of the machine's two limits binds a model, and what share of it a run reaches.

    A step takes at least as long as its operations at the peak rate of matrix products in their dtypes, and at least as
    long as its bytes at the memory's rate, each divided over the devices. A step that touches no more than the last
    cache holds is measured by that cache's rate: memory does not limit it.

    Args:
      cost: of a step.
      machine: of each device, as `launch.benchmark.measure.machine.probe` returns it.
      steps_per_sec: of the run.
      devices: that share the work.

    Returns:
      bound: "compute" or "memory". limit_steps_per_sec. share_of_limit: the run's rate as a share of it; above 1 where
      the probe was disturbed, or where data stayed in caches that the count takes for memory. intensity_flops_per_byte.
      matmul_dtype: the dtype of most operations. bandwidth: "memory" or "cache", whose rate was taken.
      compute_seconds, memory_seconds: what each limit alone would allow a step.

      None if the step has no matrix products, or one in a dtype that was not measured.
    """
    peaks = machine["matmul_gflops"]
    if not cost.flops or not cost.bytes or not set(cost.flops) <= set(peaks):
        return None
    cached = machine.get("cache_gb_per_sec") and cost.resident_bytes / devices <= machine["cache_mb"] * 2**20
    rate = machine["cache_gb_per_sec"] if cached else machine["memory_gb_per_sec"]
    compute_seconds = sum(count / (1e9 * peaks[dtype]) for dtype, count in cost.flops.items()) / devices
    memory_seconds = cost.bytes / (1e9 * rate) / devices
    limit = 1.0 / max(compute_seconds, memory_seconds)
    return {
        "bound": "compute" if compute_seconds >= memory_seconds else "memory",
        "limit_steps_per_sec": limit,
        "share_of_limit": steps_per_sec / limit,
        "intensity_flops_per_byte": cost.total_flops / cost.bytes,
        "matmul_dtype": max(cost.flops, key=cost.flops.get),
        "bandwidth": "cache" if cached else "memory",
        "compute_seconds": compute_seconds,
        "memory_seconds": memory_seconds,
    }
