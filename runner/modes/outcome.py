"""The outcome of a mode: its result, exit code and lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base import BaseRun


class Outcome(NamedTuple):
    """The outcome of a mode.

    Attributes:
      result: result of the mode, plain JSON.
      lines: lines printed once the result is written, if the run `prints`.
      report: text printed then in any case.
    """

    result: dict[str, Any]
    code: int = 0
    lines: Sequence[str] = ()
    report: str = ""


def run_result(run: BaseRun, **more) -> dict[str, Any]:
    """Returns the entries that every mode's result begins with, and `more`."""
    config, strategy = run.config, run.strategy.describe()
    return {
        "mode": config.mode,
        "model": config.model_entry.name,
        "input": config.input_entry.name if config.input_entry else None,
        "strategy": config.strategy,
        "num_replicas": strategy["replicas"],
        "step": run.state.step,
        "jit": False if run.strategy.training and run.no_jit_reason else run.state.jit,
        "precision": config.precision,
        "run_dir": config.run_dir,
        **({"classes": [*run.data_info.classes]} if run.data_info.classes else {}),
        **run.strategy.report(),
        **more,
    }
