"""The work of each `--mode` but training, one function each, with everything put together already. Host code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.hooks import evaluation, numerics
from . import export as exports
from . import fingerprints, prediction_files, predictions, reading, weights
from .session import Session


def evaluate(session: Session) -> tuple[dict[str, Any], int]:
    """Evaluates checkpoints of a run: the latest, the best, all, or that of one step."""
    results: dict[int, dict[str, float]] = {}
    for manifest in reading.restored(session):
        if not results and session.trainer.given.vocabulary:
            fingerprints.warn_of_ids(session.config, manifest, session.checkpoints.about)
        results[manifest.step] = evaluation.evaluate(session.strategy, session.state)
        session.say(f"evaluation at step {manifest.step}: {as_line(results[manifest.step])}")
    result = result_of(session, eval=results[session.state.step])
    if len(results) > 1:
        result["evals"] = {str(step): metrics for step, metrics in results.items()}
    return result, 0


def export(session: Session) -> tuple[dict[str, Any], int]:
    """Writes the model of the latest (or chosen) checkpoint as a SavedModel or Keras file."""
    for manifest in reading.restored(session):
        taken = f"{'best' if session.config.eval_checkpoint == 'best' else 'checkpoints'}/{manifest.name}"
    numerics.check_weights(session.trainer, f"step {session.state.step}")
    config = session.config
    session.known = weights.about(config.run_dir).known  # the model's, whatever the data has come to be
    path = exports.save(session, config.output_path)
    kind = "Keras model" if path.endswith(".keras") else "SavedModel"
    session.say(f"{kind} of step {session.state.step}, {taken}: {path}")
    return {**result_of(session), "export": path, "checkpoint": taken}, 0


def predict(session: Session) -> tuple[dict[str, Any], int]:
    """Writes the predictions of the latest (or chosen) checkpoint for the examples of a split."""
    config = session.config
    for manifest in reading.restored(session):
        if session.trainer.given.vocabulary:
            fingerprints.warn_of_ids(config, manifest, session.checkpoints.about)
    numerics.check_weights(session.trainer, f"step {session.state.step}")
    predictor = predictions.Predictor(session)
    examples = predictor.checked(None, config.predict_split)
    columns = prediction_files.columns(session, examples, predictor(examples))
    count = len(next(iter(columns.values())))
    if session.strategy.is_chief:
        prediction_files.write(config.output, columns, session.names.classes)
    session.say(f"predictions of {count:,} examples by the model of step {session.state.step}: {config.output}")
    return {**result_of(session), "output": config.output, "examples": count}, 0


def as_line(metrics: Mapping[str, float]) -> str:
    """Formats metrics for people, sorted by name."""
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))


def result_of(session: Session, **more) -> dict[str, Any]:
    """Returns what every mode's result begins with, and `more`."""
    config, where = session.config, session.strategy.describe()
    return {
        "mode": config.mode,
        "model": config.model_entry.name,
        "input": config.input_entry.name if config.input_entry else None,
        "strategy": config.strategy,
        "num_replicas": where["replicas"],
        "step": session.state.step,
        "jit": False if session.strategy.without_jit else session.state.jit,
        "precision": config.precision,
        "run_dir": config.run_dir,
        **({"classes": [*session.known.classes]} if session.known.classes else {}),
        **session.strategy.report(),
        **more,
    }
