"""The work of each `--mode` but training, one function each, with everything put together already. Host code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....engine.hooks import evaluation, numerics
from ....engine.metrics.by_class import report
from ..base import BaseRun
from ..saved import fingerprints, restoring
from . import export as exports
from . import prediction_files, predictions

_SHOWN_CLASSES = 20


class Outcome(NamedTuple):
    """The outcome of a mode.

    Attributes:
      result: plain JSON.
      code: the exit code.
      lines: printed once the result is written, if the run `prints`.
      report: printed then in any case.
    """

    result: dict[str, Any]
    code: int = 0
    lines: Sequence[str] = ()
    report: str = ""


def evaluate(run: BaseRun) -> Outcome:
    """Evaluates checkpoints of a run: the latest, the best, all, or that of one step."""
    config, results = run.config, dict[int, evaluation.Evaluated]()
    for manifest in restoring.restored(run):
        if not results and run.trainer.run_context.vocabulary:
            fingerprints.warn_of_ids(config, manifest, run.checkpoints.about)
        results[manifest.step] = evaluation.evaluate(run.strategy, run.state, directory=config.run_dir)
        run.log(f"evaluation at step {manifest.step}: {format_metrics(results[manifest.step])}")
    evaluated = results[run.state.step]
    reports, tables = by_class(run, evaluated)
    result = result_of(run, eval=evaluated, **reports)
    if len(results) > 1:
        result["evals"] = {str(step): metrics for step, metrics in results.items()}
    return Outcome(result, lines=tables)


def export(run: BaseRun) -> Outcome:
    """Writes the model of the latest (or chosen) checkpoint as a SavedModel or Keras file."""
    for manifest in restoring.restored(run):
        taken = f"{'best' if run.config.eval_checkpoint == 'best' else 'checkpoints'}/{manifest.name}"
    numerics.check_weights(run.trainer, f"step {run.state.step}")
    config = run.config
    path = exports.save(run, config.output_path, config.export_model)
    kind = "Keras model" if path.endswith(".keras") else "SavedModel"
    line = f"{kind} of step {run.state.step}, {taken}: {path}"
    return Outcome({**result_of(run), "export": path, "checkpoint": taken}, lines=[line])


def predict(run: BaseRun) -> Outcome:
    """Writes the predictions of the latest (or chosen) checkpoint for the examples of a split."""
    config = run.config
    for manifest in restoring.restored(run):
        if run.trainer.run_context.vocabulary:
            fingerprints.warn_of_ids(config, manifest, run.checkpoints.about)
    numerics.check_weights(run.trainer, f"step {run.state.step}")
    predictor = predictions.Predictor(run, config.export_model)
    examples = predictor.checked(None, config.predict_split)
    outputs = predictor(examples)
    columns = prediction_files.columns(run, examples, outputs, config.export_model)
    count = len(next(iter(columns.values())))
    if run.strategy.is_chief:
        prediction_files.write(config.output, columns, run.names.classes)
    line = f"predictions of {count:,} examples by the model of step {run.state.step}: {config.output}"
    return Outcome({**result_of(run), "output": config.output, "examples": count}, lines=[line])


def by_class(run: BaseRun, evaluated: evaluation.Evaluated) -> tuple[dict[str, Any], list[str]]:
    """Returns a result's entries of an evaluation's confusion matrices, and those of few classes as tables."""
    reports = {name: report(matrix) for name, matrix in evaluated.confusion.items()}
    few = [each for each in reports.values() if len(each["support"]) <= _SHOWN_CLASSES]
    return {"by_class": reports} if reports else {}, [_table(each, run.names.classes) for each in few]


def _table(report: Mapping[str, Any], classes: Sequence[str] | None) -> str:
    numbers = [*map(str, range(len(report["support"])))]
    names = [*map(" ".join, zip(numbers, classes, strict=True))] if classes else numbers
    shares = ("precision", "recall", "f1")
    rows = [["class", *shares, "support", *(f"as {number}" for number in numbers)]]
    for number, name in enumerate(names):
        counts = report["support"][number], *report["matrix"][number]
        rows.append([name, *(f"{report[share][number]:.3f}" for share in shares), *map(str, counts)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sized = [[f"{row[0]:{widths[0]}}", *map(str.rjust, row[1:], widths[1:])] for row in rows]
    lines = ["  ".join(row) for row in sized]
    matrix = np.array(report["matrix"])
    for sums, why in ((matrix.sum(0), "never predicted, so their precision is 0"), (matrix.sum(1), "not in the data")):
        if lacking := [name for name, count in zip(names, sums, strict=True) if not count]:
            lines.append(f"classes that are {why}: {', '.join(lacking)}")
    return "\n".join(lines)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics for people, sorted by name."""
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))


def result_of(run: BaseRun, **more) -> dict[str, Any]:
    """Returns what every mode's result begins with, and `more`."""
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
        **({"classes": [*run.known.classes]} if run.known.classes else {}),
        **run.strategy.report(),
        **more,
    }
