"""Settings that can't be combined: two tables of conditions, and their error messages.

Each conflict needs the configuration alone; `checks` has what needs files, hosts or TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..failures import UsageError
from . import rules
from .config import READING, SCHEDULES_TO_THE_END, Config

PREDICTION_FILES = (".csv", ".parquet", ".npz")  # by their endings
# When a conflict holds, and its line, in which {c} is the configuration; the other names are in `refuse`.
Conflicts = Sequence[tuple[Callable[[Config], Any], str]]


def refuse(config: Config, conflicts: Conflicts) -> None:
    """Raises `UsageError` with the line of the first conflict that holds."""
    line = next((line for holds, line in conflicts if holds(config)), None)
    if line is not None:
        names = {
            "sharded": _sharding(config),
            "apart": f"sync_every_steps={config.sync_every_steps}, whose replicas differ between syncs",
            "watching": f"{_watching(config)} watches monitor={config.monitor}",
            "watch_train": f"use monitor={dataclasses.replace(config.monitored, source='train')}",
            "ending": _ending(config) or "nothing",
            "tasks": len(config.cluster.addresses) if config.cluster else 1,
            "give_data": "return (train, eval) from the data function, or use validation_split=0.1",
        }
        raise UsageError(line.format(c=config, **names))


def _sharding(c: Config) -> str:
    """Names the setting that shards the model, or its update, across replicas; "" if none does."""
    if rules.mesh_shape(c.mesh).get("model", 1) > 1:
        return f"mesh={c.mesh}"
    return "shard_optimizer" if c.shard_optimizer else ""


def _watching(c: Config) -> str:
    """Names the setting that watches a metric of evaluations; "" if none does."""
    if c.monitored.source != "eval":
        return ""
    return "early_stopping" if c.early_stopping else "reduce_lr" if c.reduce_lr else ""


def _ending(c: Config) -> str:
    return os.path.splitext(c.output or "")[1]


# Settings of where a run's steps are computed.
PLACEMENT_CONFLICTS: Conflicts = (
    (
        lambda c: c.is_evaluator and not c.run_dir,
        "an evaluator finds its checkpoints in run_dir; give the run's",
    ),
    (
        lambda c: c.is_evaluator and c.remote,
        "run_dir={c.remote.url} is copied here as a process begins, and an evaluator looks for checkpoints that come "
        "later; use mode=train_and_eval without one, or a folder that all tasks share",
    ),
    (
        lambda c: c.run_eagerly and c.strategy != "one_device",
        "run_eagerly executes steps op by op on one device; use strategy=one_device instead of {c.strategy}, or leave "
        "run_eagerly out",
    ),
    (
        lambda c: c.min_workers and (not c.max_restarts or c.tasks.is_chosen),
        "min_workers={c.min_workers} is for workers that start again in their places, each on its host; give "
        "max_restarts to crankshaft train or crankshaft.main (crankshaft local always starts all of its workers again)",
    ),
    (
        lambda c: c.min_workers and (not (c.run_dir and c.trains) or c.remote),
        "min_workers={c.min_workers} needs a run that trains and has run_dir on a file system that all workers share, "
        "whose lock decides which of them continue",
    ),
    (
        lambda c: c.min_workers and c.auto_shard_policy == "file",
        "min_workers={c.min_workers}: auto_shard_policy=file divides files by the number of workers, so with fewer the "
        "order is another; use auto_shard_policy=data",
    ),
    (
        lambda c: c.min_workers and c.min_workers >= c.tasks.num_workers,
        "min_workers={c.min_workers}: there are {c.tasks.num_workers} workers; give fewer than that",
    ),
    (
        lambda c: c.strategy == "parameter_server" and c.reduce_dtype == "float16",
        "reduce_dtype=float16 has no room for the small gradients of a mean, which is what workers push; use bfloat16",
    ),
    (
        lambda c: c.jit == "on" and c.num_virtual_devices > 1,
        "jit=on needs one replica, and there are {c.num_virtual_devices}; use jit=auto or off",
    ),
    (
        lambda c: _sharding(c) and c.sync_every_steps > 1,
        "{sharded} does not go with sync_every_steps={c.sync_every_steps}, which lets replicas train by themselves, "
        "and replicas of a sharded model can't; leave one out",
    ),
    (
        lambda c: _sharding(c) and c.remote and c.strategy == "multi_worker",
        "{sharded}: workers write parts of one checkpoint, and each has run_dir={c.remote.url} in a copy of its own; "
        "use a folder that all of them see",
    ),
    (lambda c: c.jit == "on" and c.no_jit_reason, "jit=on: {c.no_jit_reason}; use jit=auto or off"),
)

CONFLICTS: Conflicts = (
    (
        lambda c: c.max_restarts and not c.owns_process,
        "max_restarts={c.max_restarts} is for programs with a command line; leave it out, or use crankshaft.main",
    ),
    (
        lambda c: c.is_endless and c.learning_rate_schedule in SCHEDULES_TO_THE_END,
        "learning_rate_schedule={c.learning_rate_schedule} ends where the run does, and the run has no length; give "
        "train_steps or train_epochs",
    ),
    *PLACEMENT_CONFLICTS,
    (
        lambda c: c.bind and c.cluster is None and c.metrics_port is None,
        "bind={c.bind} has no use without several tasks or metrics_port; leave it out",
    ),
    (
        lambda c: c.metrics_port is not None and not c.trains,
        "metrics_port={c.metrics_port} has no use with mode={c.mode}; it serves a run that trains, so leave it out",
    ),
    (
        lambda c: c.trains and c.train_steps and c.warmup_steps >= c.train_steps,
        "warmup_steps={c.warmup_steps} leaves nothing of train_steps={c.train_steps}; use fewer",
    ),
    (
        lambda c: "global_batch_size" not in c.set_by_data and c.accumulate_steps > c.global_batch_size,
        "accumulate_steps={c.accumulate_steps} is more than the {c.global_batch_size} examples of global_batch_size; "
        "use fewer",
    ),
    (
        lambda c: c.sync_every_steps > 1 and c.precision == "float16",
        "precision=float16 can't be combined with {apart}; leave one of them out",
    ),
    (
        lambda c: c.sync_every_steps > 1 and c.ema_decay,
        "ema_decay={c.ema_decay} can't be combined with {apart}; leave one of them out",
    ),
    (
        lambda c: c.sync_every_steps > 1 and c.strategy == "tpu",
        "strategy=tpu can't be combined with {apart}; leave one of them out",
    ),
    (
        lambda c: c.restore_best and c.mode == "train" and c.has_evaluator,
        "restore_best takes the best evaluation's weights, and the evaluator keeps it in best/",
    ),
    (
        lambda c: c.restore_best and c.mode == "train",
        "restore_best takes the best evaluation's weights, and mode=train makes no evaluations; use "
        "mode=train_and_eval",
    ),
    (
        lambda c: c.eval_batches and c.mode == "train" and not c.has_evaluator,
        "eval_batches={c.eval_batches} has no use with mode=train, which makes no evaluations; use "
        "mode=train_and_eval, or leave eval_batches out",
    ),
    (
        lambda c: c.eval_every_steps and c.mode == "train" and c.has_evaluator,
        "eval_every_steps={c.eval_every_steps}: the evaluator evaluates each checkpoint; use checkpoint_every_steps",
    ),
    (
        lambda c: c.eval_every_steps and c.mode == "train",
        "eval_every_steps={c.eval_every_steps}: mode=train makes no evaluations; use mode=train_and_eval, or leave the "
        "flag out",
    ),
    (
        lambda c: _watching(c) and c.mode == "train" and c.has_evaluator,
        "{watching}, and the evaluator's are not known to the run; {watch_train}",
    ),
    (
        lambda c: _watching(c) and c.mode == "train",
        "{watching}, and mode=train makes no evaluations; {watch_train} or mode=train_and_eval",
    ),
    (
        lambda c: _watching(c) and c.mode == "train_and_eval" and c.eval_every_steps == 0,
        "{watching}, and eval_every_steps=0 makes none before the end; {watch_train} or evaluate more often",
    ),
    (
        lambda c: c.follow and c.eval_checkpoint != "all",
        "follow evaluates each checkpoint, and eval_checkpoint={c.eval_checkpoint} is one; give eval_checkpoint=all",
    ),
    (
        lambda c: c.follow and c.cluster,
        "follow is for one process beside a run, and there are {tasks}; leave their addresses out",
    ),
    (
        lambda c: c.follow and c.remote,
        "run_dir={c.remote.url} is copied here as a process begins, and follow looks for checkpoints that come later; "
        "follow it in the folder that the run writes",
    ),
    (
        lambda c: c.eval_checkpoint == "all" and c.mode in READING and c.mode != "eval",
        "eval_checkpoint=all is for mode=eval, and mode={c.mode} takes one; give latest, best or a step",
    ),
    (
        lambda c: not c.remote and any("://" in (path or "") for path in (c.tensorboard_dir, c.export_dir)),
        "a tensorboard_dir or export_dir in a bucket is copied with the run's folder; give a run_dir in a bucket too",
    ),
    (
        lambda c: c.export_dir and not c.trains,
        "export_dir={c.export_dir} has no use with mode={c.mode}; use mode=export, or leave export_dir out",
    ),
    (
        lambda c: c.export_dir and c.trains and c.cluster,
        "export_dir is for a run of one process, and there are {tasks}; use mode=export after it",
    ),
    (
        lambda c: c.mode == "export" and c.cluster,
        "mode=export is done by one process, and there are {tasks}; give one of them strategy=one_device",
    ),
    (
        lambda c: c.mode == "predict" and not c.output,
        f"mode=predict needs output=FILE, one of {', '.join(PREDICTION_FILES)}",
    ),
    (
        lambda c: c.mode == "predict" and _ending(c) not in PREDICTION_FILES,
        "output={c.output} ends in {ending}; give a file of predictions one of the endings "
        f"{', '.join(PREDICTION_FILES)}",
    ),
)

# Settings that need evaluation data, in a run whose data has none.
WITHOUT_EVALUATION_DATA: Conflicts = (
    (lambda c: c.is_evaluator, "an evaluator needs evaluation data, and the data has none; {give_data}"),
    (lambda c: c.mode == "eval", "mode=eval needs evaluation data, and the data has none; {give_data}"),
    (
        lambda c: c.mode == "train_and_eval" and c.restore_best,
        "restore_best needs evaluation data, and the data has none; {give_data}",
    ),
    (
        lambda c: c.mode == "train_and_eval" and c.eval_every_steps,
        "eval_every_steps={c.eval_every_steps} needs evaluation data, and the data has none; {give_data}",
    ),
    (
        lambda c: c.mode == "train_and_eval" and _watching(c),
        "{watching}, and the run has no evaluation data; {watch_train}, or {give_data}",
    ),
    (
        lambda c: c.mode == "train_and_eval" and c.monitored.source == "eval" and c.monitored.metric != "loss",
        "monitor={c.monitor}, and the run has no evaluation data; {watch_train}, or {give_data}",
    ),
)
