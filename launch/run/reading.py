"""Chooses and restores the checkpoints of a run that are read, the same on all its workers. Host code."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from ...engine.checkpoints import Checkpoints, Manifest
from ...engine.hooks import saving
from ...engine.internals.errors import CheckpointError
from ..command_line import checks
from ..command_line import config as configs
from ..errors import UsageError
from . import fingerprints
from .base import BaseRun


def newest(run: BaseRun, checkpoints: Checkpoints) -> Manifest | None:
    """Returns, on every worker, the newest whole checkpoint that the chief finds."""
    manifest = checkpoints.latest()
    step = run.strategy.exchange(-1 if manifest is None else manifest.step)[0]
    if manifest is None or manifest.step != step:
        manifest = next(iter(checkpoints.all(lambda each: each.step == step)), None)
        if manifest is None and step >= 0:
            raise UsageError(
                f"{run.config.cluster.task} finds no checkpoint of step {step} in {checkpoints.directory}, and the "
                "chief restores it; put --run_dir on a file system that all workers see"
            )
    return manifest


def found(run: BaseRun, checkpoints: Checkpoints, which: str | int) -> Manifest:
    """Returns, on every worker, the checkpoint that `Run.restore` names: best, latest, or that of a step.

    Raises:
      UsageError: there is no such checkpoint, or not a whole one.
    """
    if which in ("best", "latest"):
        manifest = newest(run, checkpoints)
    else:
        manifest = next(iter(checkpoints.all(lambda each: each.step == which)), None)
    if not all(run.strategy.exchange(int(manifest is not None))):
        steps = ", ".join(map(str, sorted(each.step for each in run.checkpoints.all())))
        cure = f"use latest, best, or a step of {steps}" if steps else "none is saved yet, which save() does"
        raise UsageError(f"restore({which!r}): there is no such whole checkpoint; {cure}")
    return manifest


def restored(run: BaseRun) -> Iterator[Manifest]:
    """Restores the checkpoints that were asked for, the oldest first, each when the caller is done with the one before.

    A checkpoint that a live run removes meanwhile is left out; for `latest` and `best` there is a newer one then.
    """
    config = run.config
    which = config.eval_checkpoint
    checkpoints = run.best if which == "best" else run.checkpoints
    count = 0
    if which in ("latest", "best"):
        while newest_one := newest(run, checkpoints):
            if manifest := _unless_swept(run, checkpoints, newest_one):
                count += 1
                yield manifest
                break
    else:
        for manifest in _listed(run, which):
            if _unless_swept(run, checkpoints, manifest):
                count += 1
                yield manifest
    if not count:
        cure = f"{problem}; mend it" if (problem := checkpoints.problem()) else "train first"
        raise UsageError(f"--run_dir={config.run_dir} has no whole checkpoint ({which}); {cure}")


def check_same_run(run: BaseRun, manifest: Manifest) -> None:
    """Raises `UsageError` where a checkpoint is of a run of another configuration, as its manifest has it."""
    where = manifest.path
    checks.check_same_run(run.config, where, configs.of_run(where, manifest.about))


def check_position(run: BaseRun, manifest: Manifest) -> None:
    """Raises `UsageError` where training can't go on from a checkpoint, since its batches were of another size."""
    order = run.strategy.train_order
    if manifest.step < order.origin.step:
        raise UsageError(
            f"{manifest.name} was written before batches of {order.batch_size} began, at step {order.origin.step}, and "
            f"this process goes on from there; use a checkpoint of step {order.origin.step} or later"
        )


def _unless_swept(run: BaseRun, checkpoints: Checkpoints, manifest: Manifest) -> Manifest | None:
    check_same_run(run, manifest)
    if run.config.mode == "eval":
        fingerprints.check_evaluated(run.config, manifest, checkpoints.about)
    found = failure = None
    try:
        again = run.config.allow_changed_config
        found = saving.restore(checkpoints, run.state, manifest=manifest, begins_again=again)
    except (CheckpointError, tf.errors.OpError) as error:
        failure = error
    # Workers that evaluate together all restore it, or none.
    if any(run.strategy.exchange(int(failure is not None and manifest.problem() is not None))):
        logging.warning("%s was removed before it could be read", manifest.name)
        return None
    if failure is not None:
        raise failure
    return found


def _listed(run: BaseRun, which: str) -> list[Manifest]:
    manifests = run.checkpoints.all(lambda each: which in ("all", str(each.step)))
    if manifests or which == "all":
        return manifests
    steps = ", ".join(str(manifest.step) for manifest in run.checkpoints.all())
    raise UsageError(f"--eval_checkpoint={which} is none of latest, best, all, {steps}")
