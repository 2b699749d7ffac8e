"""Restores the checkpoints of a run, the same on all its workers: to train on from, and to read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import Checkpoints, Manifest, RunDir
from ...engine.errors import CheckpointError
from ...engine.hooks import evaluation, saving
from ...engine.internals import keras_optimizers
from ..base import BaseRun
from ..command_line import checks, saved_config
from ..command_line.values import differences
from ..failures import UsageError
from ..host import cpu_threads
from ..saved import architecture, fingerprints, model_file
from . import weights


def restore_to_train(run: BaseRun, to_end: bool) -> Manifest | None:
    """Restores the run's latest checkpoint, or begins the run if it has none, not even a broken one.

    `to_end`: whether it is then trained to its end, rather than as its program chooses, on any data.
    """
    manifest = _find_to_train(run, to_end) if run.checkpoints else None
    if manifest is None:
        weights.load_init_from(run)
        return None
    best = run.checkpoints_for("best")
    checkpoints = best if os.path.dirname(manifest.path) == best.directory else run.checkpoints_for("latest")
    # Restoring brings the learning rates back; one that `compile` has changed since then is set again afterwards.
    rates = {}
    if any(" learning_rate: " in line for line in _changes(run, manifest, "compile")):  # else as callbacks set them
        for optimizer in run.trainer.inventory.optimizers.values():
            if optimizer.as_keras and not callable(rate := keras_optimizers.schedule_or_rate(optimizer.as_keras)):
                rates[optimizer] = rate
    saving.restore(checkpoints, run.state, run.hooks, manifest, run.config.allow_changed_config, run.loop.meter)
    for optimizer, rate in rates.items():
        optimizer.set_learning_rate(rate)
    return manifest


def _changes(run: BaseRun, manifest: Manifest, part: str) -> list[str]:
    """Lists what a model's `compile`, or a program's `optimizers`, now decide otherwise than as the run began."""
    then, now = (about.get(part, {}) for about in (manifest.about, run.checkpoints_for("latest").about))
    return differences(then, now) if then and now else []


def _find_to_train(run: BaseRun, to_end: bool) -> Manifest | None:
    """Finds the checkpoint from which the run continues, if any. Raises `UsageError` if it can't."""
    checkpoints, best = run.checkpoints_for("latest"), run.checkpoints_for("best")
    checkpoints.clean()
    best.clean()
    manifest, about = newest(run, checkpoints), checkpoints.about
    # The checkpoint of the best evaluation has all of the run, unless an evaluator, without the run's hooks, wrote it.
    best_manifest = None if run.config.has_evaluator else newest(run, best)
    if best_manifest and best_manifest.is_after(manifest):
        manifest = best_manifest
    # A newer snapshot that the attempt before has left in memory becomes a checkpoint first, if there is one.
    step = run.take_from_memory and run.take_from_memory(-1 if manifest is None else manifest.step)
    if step is not None:
        run.is_from_memory = True
        saved = f"the newest checkpoint is of step {manifest.step:,}" if manifest else "there is no checkpoint yet"
        run.log(f"step {step:,} is taken from memory, where the attempt before left it: {saved}")
        manifest = newest(run, checkpoints)
    if manifest is None:
        if problem := checkpoints.problem():
            raise UsageError(
                f"no checkpoint in {checkpoints.directory} can be read ({problem}); restore it from a copy, or "
                "begin in another run_dir, from the start or, with init_from, from other weights"
            )
        return None
    _check_rules(run, manifest)
    check_same_run(run, manifest)
    for part, kind in (("compile", "a model that was compiled otherwise"), ("optimizers", "another optimizer")):
        changed = _changes(run, manifest, part)
        if changed and not run.config.allow_changed_config:
            raise UsageError(
                f"{manifest.path} is a run of {kind} ({'; '.join(changed)}); use another run_dir, the former "
                "values, or allow_changed_config, which takes the new ones"
            )
    check_position(run, manifest)
    is_complete = to_end and run.train_steps is not None and manifest.step >= run.train_steps
    fingerprints.check_resumed(run.config, manifest, about, is_complete)
    fingerprints.check_division(run.config, manifest, about, run.strategy.num_replicas)
    if run.config.is_chief:
        cpu_threads.warn_of_others(manifest, about)
    return manifest


def _check_rules(run: BaseRun, manifest: Manifest) -> None:
    """Raises `UsageError` or warns if a run was begun by other rules of shuffling and updating: its bits differ."""
    config, changed = run.config, run.state.changed_rules(manifest.host_state.get("state", {}))
    if not changed:
        return
    rules = "; ".join(f"{name} (since {version})" for name, version in changed.items())
    message = f"run_dir={config.run_dir} was begun by other rules than these: {rules}"
    if not config.allow_changed_config:
        raise UsageError(
            f"{message}. Its numbers would not be those of one run; use another run_dir, the version that began it, or "
            "allow_changed_config"
        )
    if config.is_chief:
        logging.warning("%s: it continues by these", message)


def newest(run: BaseRun, checkpoints: Checkpoints) -> Manifest | None:
    """Returns, on every worker, the newest whole checkpoint that the chief finds."""
    manifest = checkpoints.latest()
    # On a network file system this worker may see another as the newest, so the chief's step counts.
    step = run.strategy.exchange(-1 if manifest is None else manifest.step)[0]
    if manifest is None or manifest.step != step:
        manifest = next(iter(checkpoints.all(lambda manifest: manifest.step == step)), None)
        if manifest is None and step >= 0:
            raise UsageError(
                f"{run.config.tasks.task} finds no checkpoint of step {step} in {checkpoints.directory}, and the "
                "chief restores it; put run_dir on a file system that all workers see"
            )
    return manifest


def find(run: BaseRun, checkpoints: Checkpoints, which: str | int) -> Manifest:
    """Returns, on every worker, the checkpoint that `Run.restore` names: best, latest, or that of a step.

    Raises:
      UsageError: the checkpoint does not exist, or is incomplete.
    """
    if which in ("best", "latest"):
        manifest = newest(run, checkpoints)
    else:
        manifest = next(iter(checkpoints.all(lambda manifest: manifest.step == which)), None)
    # All raise, or none: whoever raised alone would leave the others waiting.
    is_everywhere = all(run.strategy.exchange(manifest is not None))
    if manifest is None or not is_everywhere:
        raise missing(f"restore({which!r}): {run.config.configured_run_dir}", run.checkpoints_for("latest"), which)
    return manifest


def missing(folder: str, checkpoints: Checkpoints, which: str | int) -> UsageError:
    """Makes the error for a requested checkpoint that does not exist, which names those that do."""
    if steps := ", ".join(map(str, sorted(manifest.step for manifest in checkpoints.all()))):
        fix = f"use latest, best, or a step of {steps}"
    elif which != "best" and RunDir(os.path.dirname(checkpoints.directory)).steps("best"):
        fix = "use best"
    else:
        fix = f"{problem}; mend it" if (problem := checkpoints.problem()) else "train first"
    return UsageError(f"{folder} has no whole checkpoint {which}; {fix}")


def restored_since(run: BaseRun, step: int) -> Iterator[Manifest]:
    """Restores each checkpoint newer than a step, the oldest first; those that are removed meanwhile are left out."""
    steps = checks.checkpoint_steps(run.config.files.path)
    if not steps or steps[-1] <= step:
        return
    checkpoints = run.checkpoints_for("latest")
    for manifest in checkpoints.all(lambda manifest: manifest.step > step):
        if restore_unless_removed(run, checkpoints, manifest):
            yield manifest


def restored(run: BaseRun, which: str | int = "") -> Iterator[Manifest]:
    """Restores the requested checkpoints, the oldest first, each once the caller has finished with the last.

    `which`: as --eval_checkpoint, whose value it has if it is empty.
    A checkpoint that a live run removes meanwhile is skipped; `latest` and `best` then take a newer one. `latest` has
    the weights with which training ends, the averages of Keras's `use_ema`; others those that were evaluated then.
    """
    config = run.config
    which = str(which) or config.eval_checkpoint
    checkpoints = run.checkpoints_for(which)
    if which in ("latest", "best"):
        while newest_one := newest(run, checkpoints):
            if manifest := restore_unless_removed(run, checkpoints, newest_one):
                if which == "latest":
                    evaluation.hand_over_final_averages(run.trainer)
                yield manifest
                return
    is_restored = False
    for manifest in checkpoints.all(lambda manifest: which in ("all", str(manifest.step))):
        if restore_unless_removed(run, checkpoints, manifest):
            is_restored = True
            yield manifest
    if not is_restored:
        raise missing(f"run_dir={config.run_dir}", checkpoints, which)


def check_same_run(run: BaseRun, manifest: Manifest) -> None:
    """Raises `UsageError` if a checkpoint is of another configuration than the run, or the run of other layers."""
    path = manifest.path
    checks.check_same_run(run.config, path, saved_config.check(path, manifest.about))
    weights.check_compatible(run.trainer, manifest)
    try:
        before = model_file.read(run.config.files.path)
    except UsageError:  # training writes it again, and what needs it refuses it
        return
    if changed := architecture.changes(before.content, run.trainer):
        message = f"{run.config.files.model} is of a model of other layers than this program's ({changed})"
        if not run.config.allow_changed_config:
            raise UsageError(f"{message}; use another run_dir, the same layers, or allow_changed_config")
        if run.config.is_chief:
            logging.warning("%s: its weights are used in these", message)


def check_position(run: BaseRun, manifest: Manifest) -> None:
    """Raises `UsageError` if training can't continue from a checkpoint, since its batches had another size."""
    order = run.strategy.training.feed.order
    if manifest.step < (first := order.origin.step):
        raise UsageError(
            f"{manifest.name} was written before batches of {order.batch_size} began, at step {first}, and this "
            f"process continues from there; use a checkpoint of step {first} or later"
        )


def restore_unless_removed(run: BaseRun, checkpoints: Checkpoints, manifest: Manifest) -> Manifest | None:
    """Restores a checkpoint, to read it, and returns its manifest; None where the run has removed it meanwhile."""
    check_same_run(run, manifest)
    if run.config.mode == "eval" or run.config.reads_evaluation_alone:
        fingerprints.check_evaluated(run.config, manifest, checkpoints.about)
    restored_manifest = failure = None
    try:
        again = run.config.allow_changed_config or run.config.leaves_optimizer_out
        restored_manifest = saving.restore(checkpoints, run.state, manifest=manifest, allow_changed=again)
    except (CheckpointError, tf.errors.OpError) as error:
        failure = error
    # Workers that evaluate together all restore it, or none.
    if any(run.strategy.exchange(failure is not None and manifest.problem() is not None)):
        logging.warning("%s was removed before it could be read", manifest.name)
        return None
    if failure is not None:
        raise failure
    return restored_manifest
