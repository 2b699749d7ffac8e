"""Times sums over replicas alone: how long this model's gradients travel, and in which form they are fastest.

Host code.
"""

from __future__ import annotations

import tensorflow as tf

from ....engine.holdings import Holdings
from ....engine.reduction import Reduction
from ....engine.state import TrainState
from . import parts

PACKS_MB = (1, 4, 16, 0)  # 0 is one pack
DTYPES = ("float32", "bfloat16")


def reduce(strategy, state: TrainState, feed, reduction: Reduction | None = None, gradients: bool = True) -> parts.Part:
    """Makes a part of one sum a step by `reduction`, the run's own if None.

    With `gradients`, it sums gradients that exist already and what travels with them.
    """
    trainer = state.trainer
    reduction = reduction or trainer.reduction
    variables, averages = (
        (parts.dense_variables(trainer), Holdings(trainer).moving_statistics) if gradients else ([], [])
    )

    def add(gradients, *_):
        summed, count = reduction.sum(list(gradients), tf.constant(1.0), averages, variables)
        return parts.used([*summed, count], jit=False)

    return parts.made(strategy, state, parts.gradients_feed(strategy, variables, feed.order.batch_size), add)


def why_not(strategy, state: TrainState) -> str | None:
    """Returns why there is no sum to time, or None if there is one."""
    if not strategy.updates_here:
        return "workers around parameter servers sum nothing"
    if strategy.num_replicas == 1:
        return "one replica has nobody to sum with"
    if state.trainer.reduction.sync_every_steps:
        return "replicas that meet every --sync_every_steps sum nothing in a step"
    return None


def forms(strategy, state: TrainState, feed, seconds: float) -> dict:
    """Times the model's sums in every dtype and size of pack, in turn.

    Args:
      strategy: of the run.
      state: of the run.
      feed: of the run.
      seconds: about so long for each.

    Returns:
      latency_ms: of a sum of four bytes; settings: [{dtype, pack_mb, and what `parts.timed` and `figures` return}]. All
      sizes that make one pack are measured as one, 0.
    """
    variables = parts.dense_variables(state.trainer)
    asked = {(dtype, pack_mb): Reduction(dtype, pack_mb << 20) for dtype in DTYPES for pack_mb in PACKS_MB}
    asked = {key: each for key, each in asked.items() if each.pack_bytes < _travels(each, variables)}
    made: dict[object, parts.Part] = {key: reduce(strategy, state, feed, each) for key, each in asked.items()}
    timed = parts.timed(
        strategy, state, {**made, "latency": reduce(strategy, state, feed, Reduction(), False)}, seconds
    )
    settings = [
        {"dtype": dtype, "pack_mb": pack_mb, **timed[dtype, pack_mb]}
        | figures(each, variables, strategy.num_replicas, timed[dtype, pack_mb]["ms_per_step"])
        for (dtype, pack_mb), each in asked.items()
    ]
    return {"latency_ms": timed["latency"]["ms_per_step"], "settings": settings}


def figures(reduction: Reduction, variables: list[tf.Variable], replicas: int, ms_per_step: float) -> dict:
    """Returns a sum's rates, as nccl-tests defines them.

    See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Returns:
      bytes: of one replica's gradients in the dtype that they travel in; gb_per_sec: 1e9 of them a second;
      bus_gb_per_sec: what each replica's link carries: times 2 (n-1) / n for an all-reduce (float32; from three CPU
      workers on, small packs that are gathered carry more), times n-1 for an all-gather (16 bits).
    """
    travels = _travels(reduction, variables)
    rate = travels / (1e6 * ms_per_step)
    factor = 2 * (replicas - 1) / replicas if reduction.reduce_dtype == tf.float32 else replicas - 1
    return {"bytes": travels, "gb_per_sec": rate, "bus_gb_per_sec": factor * rate}


def _travels(reduction: Reduction, variables: list[tf.Variable]) -> int:
    return sum(reduction.reduce_dtype.size * variable.shape.num_elements() for variable in variables)
