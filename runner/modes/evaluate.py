"""Evaluates a run: `--mode=eval`, and `Run.evaluate`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...engine.checkpoints import Manifest
from ...engine.hooks import StopRequest, evaluation
from ...engine.metrics.by_class import report as class_report
from .. import progress
from ..base import BaseRun
from ..command_line import following
from ..failures import UsageError
from ..host.signals import EXIT_CODES, Signals
from ..restored import restoring
from ..saved import fingerprints
from . import external
from .outcome import Outcome, run_result

_SHOWN_CLASSES = 20


def evaluate_checkpoints(run: BaseRun) -> Outcome:
    """Evaluates checkpoints of a run: the latest, the best, all, also those to come, or that of one step."""
    config, results, request = run.config, dict[int, evaluation.Evaluated](), StopRequest()
    for manifest in _followed(run, request) if config.follow else restoring.restored(run):
        if not results:
            has_ids = bool(run.trainer.run_context.vocabulary)
            fingerprints.warn_of_other_data(config, manifest, run.checkpoints_for("latest").about, has_ids)
        results[manifest.step] = evaluation.evaluate(run.strategy, run.state, directory=config.run_dir)
        run.log(progress.evaluation_line(manifest.step, results[manifest.step], config.log_format))
    evaluated = results[run.state.step]
    reports, tables = by_class(run, evaluated)
    result = run_result(run, eval=evaluated, **reports)
    if len(results) > 1:
        result["evals"] = {str(step): metrics for step, metrics in results.items()}
    return Outcome(result, EXIT_CODES.get(request.reason or "", 0), tables)


def _followed(run: BaseRun, request: StopRequest) -> Iterator[Manifest]:
    """Restores each checkpoint as another process writes it, until training has ended for good, or a signal comes."""
    newest, told = -1, None
    with Signals(request.request):
        while True:
            # Before looking: what was written until then is found below.
            code = following.exit_code(run.config.files.events)
            is_last = request.reason or code in following.FINAL
            for manifest in restoring.restored_since(run, newest):
                newest = manifest.step
                yield manifest
            if is_last and newest < 0:
                raise restoring.missing(f"run_dir={run.config.run_dir}", run.checkpoints_for("latest"), "all")
            if is_last:
                return
            if code not in (told, None):
                run.log(
                    f"training has ended with exit code {code}, after which it may be started again: waiting for it"
                )
            told = code
            time.sleep(following.POLL_SECONDS)


def evaluate(run: BaseRun, split=None, ends: Callable[[], str | None] = lambda: None) -> dict[str, float]:
    """Computes the metrics' means over a split; None is the run's own evaluation data.

    `ends`: see `Strategy.evaluate`.

    Raises:
      UsageError: the split is not of the run's form, or the run has no evaluation data.
    """
    if split is None:
        if not run.has_evaluation:
            raise UsageError("evaluate(): the run has no evaluation data; give evaluate a split")
        return evaluation.evaluate(run.strategy, run.state, directory=run.config.run_dir, ends=ends)
    with contextlib.closing(external.program(run, "eval", split)) as program:
        return evaluation.evaluate(run.strategy, run.state, program, directory=run.config.run_dir, ends=ends)


def by_class(run: BaseRun, evaluated: evaluation.Evaluated) -> tuple[dict[str, Any], list[str]]:
    """Returns a result's entries of an evaluation's confusion matrices, and those of few classes as tables."""
    reports = {name: class_report(matrix) for name, matrix in evaluated.confusion.items()}
    short = [report for report in reports.values() if len(report["support"]) <= _SHOWN_CLASSES]
    lines = [line for report in short for line in _table(report, run.names.classes)]
    return {"by_class": reports} if reports else {}, lines


def _table(report: Mapping[str, Any], classes: Sequence[str] | None) -> list[str]:
    numbers = [*map(str, range(len(report["support"])))]
    names = [*map(" ".join, zip(numbers, classes, strict=True))] if classes else numbers
    fractions = ("precision", "recall", "f1")
    table = [["class", *fractions, "support", *(f"as {number}" for number in numbers)]]
    for number, name in enumerate(names):
        counts = report["support"][number], *report["matrix"][number]
        table.append([name, *(f"{report[fraction][number]:.3f}" for fraction in fractions), *map(str, counts)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sized = [[f"{line[0]:{widths[0]}}", *map(str.rjust, line[1:], widths[1:])] for line in table]
    lines = ["  ".join(line) for line in sized]
    matrix = np.array(report["matrix"])
    for sums, why in ((matrix.sum(0), "never predicted, so their precision is 0"), (matrix.sum(1), "not in the data")):
        if lacking := [name for name, count in zip(names, sums, strict=True) if not count]:
            lines.append(f"classes that are {why}: {', '.join(lacking)}")
    return lines
