"""What `--mode=benchmark` does in the process that measures, with everything put together already. Host code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from engine.benchmark import rounds
from launch import modes
from launch.benchmark import table
from launch.session import Session, choose_jit


def benchmark(session: Session, variables: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """Times the training loop, from new weights; nothing of the run_dir is read or changed."""
    before = time.perf_counter()
    session.say(choose_jit(session))
    choosing_seconds = time.perf_counter() - before
    measured = rounds.run(session.strategy, session.state, session.config.benchmark_steps, variables)
    measured["compile_seconds"] += choosing_seconds
    result = {**modes.result_of(session), **measured}
    if session.config.is_chief:
        table.print_benchmark(result)
    return result, 0
