"""Each two settings that can't be combined, and those that nearly are such."""

from __future__ import annotations

import contextlib
import re
import types

import pytest

from crankshaft.runner.command_line import conflicts
from crankshaft.runner.command_line.config import Config
from crankshaft.runner.failures import UsageError


def task(kind="chief", workers=3, evaluators=(), is_chosen=False):
    """A cluster as one of its tasks sees it."""
    jobs = {"worker": ["w"] * workers, "evaluator": list(evaluators)}
    return types.SimpleNamespace(
        kind=kind, is_chosen=is_chosen, num_workers=workers, addresses=["a"] * 4, job=lambda name: jobs.get(name, [])
    )


REMOTE = types.SimpleNamespace(url="gs://b/r", folder="/tmp/r")
SERVERS = {"strategy": "parameter_server"}
EVALUATED = {"cluster": task(evaluators=["e"]), "mode": "train", "train_steps": 9}
ELASTIC = {"strategy": "multi_worker", "cluster": task(), "min_workers": 2, "max_restarts": 3, "run_dir": "/r"}
MULTI = {"strategy": "multi_worker", "cluster": task()}
FOLLOWS = {"mode": "eval", "run_dir": "/r", "follow": True, "eval_checkpoint": "all"}
PREDICTS = {"mode": "predict", "run_dir": "/r"}
WATCHES = {"early_stopping": {"patience": 2}}
PLATEAU = {"reduce_lr": {"patience": 2}}
TRAINS = {"mode": "train"}

CASES = [
    ({}, ""),
    ({**SERVERS, "cluster": task("evaluator")}, "an evaluator finds its checkpoints in run_dir; give the run's"),
    ({**SERVERS, "cluster": task("evaluator"), "run_dir": "/r"}, ""),
    (
        {**SERVERS, "cluster": task("evaluator"), "run_dir": "/r", "remote": REMOTE},
        "run_dir=gs://b/r is copied here as a",
    ),
    ({"run_eagerly": True}, ""),
    (
        {"run_eagerly": True, "strategy": "mirrored"},
        "run_eagerly executes steps op by op on one device; use strategy=one",
    ),
    (ELASTIC, ""),
    (
        {**ELASTIC, "max_restarts": 0},
        "min_workers=2 is for workers that start again in their places, each on its host;",
    ),
    (
        {**ELASTIC, "cluster": task(is_chosen=True)},
        "min_workers=2 is for workers that start again in their places, each",
    ),
    ({**ELASTIC, "run_dir": None}, "min_workers=2 needs a run that trains and has run_dir on a file system that all"),
    ({**ELASTIC, "mode": "eval"}, "min_workers=2 needs a run that trains"),
    ({**ELASTIC, "remote": REMOTE}, "min_workers=2 needs a run that trains"),
    ({**ELASTIC, "auto_shard_policy": "file"}, "min_workers=2: auto_shard_policy=file divides files by the number of"),
    ({"auto_shard_policy": "file"}, ""),
    ({**ELASTIC, "cluster": task(workers=2)}, "min_workers=2: there are 2 workers; give fewer than that"),
    ({**SERVERS, "cluster": task(), "reduce_dtype": "float16"}, "reduce_dtype=float16 has no room for the small"),
    ({**SERVERS, "cluster": task(), "reduce_dtype": "bfloat16"}, ""),
    ({"reduce_dtype": "float16"}, ""),
    ({"jit": "on", "num_virtual_devices": 2}, "jit=on needs one replica, and there are 2; use jit=auto or off"),
    ({"jit": "on", "num_virtual_devices": 1}, ""),
    ({"num_virtual_devices": 2}, ""),
    (
        {"mesh": "model:2", "sync_every_steps": 4},
        "mesh=model:2 does not go with sync_every_steps=4, which lets replicas",
    ),
    ({"shard_optimizer": True, "sync_every_steps": 4}, "shard_optimizer does not go with sync_every_steps=4"),
    ({"mesh": "data:2,model:1", "sync_every_steps": 4}, ""),
    ({"mesh": "model:2", "sync_every_steps": 1}, ""),
    (
        {**MULTI, "mesh": "model:2", "remote": REMOTE},
        "mesh=model:2: workers write parts of one checkpoint, and each has",
    ),
    ({**MULTI, "remote": REMOTE}, ""),
    ({"mesh": "model:2", "remote": REMOTE}, ""),
    ({"jit": "on", "debug": True}, "jit=on: XLA leaves the checks of debug out; use jit=auto or off"),
    ({"debug": True}, ""),
    (
        {"max_restarts": 2, "owns_process": False},
        "max_restarts=2 is for programs with a command line; leave it out, or",
    ),
    ({"max_restarts": 2}, ""),
    ({"owns_process": False}, ""),
    (
        {"is_endless": True, "learning_rate_schedule": "cosine"},
        "learning_rate_schedule=cosine ends where the run does,",
    ),
    ({"is_endless": True}, ""),
    ({"learning_rate_schedule": "cosine"}, ""),
    ({"bind": "10.0.0.1"}, "bind=10.0.0.1 has no use without several tasks or metrics_port; leave it out"),
    ({"bind": "10.0.0.1", "metrics_port": 0}, ""),
    ({"bind": "10.0.0.1", "cluster": task()}, ""),
    (
        {**PREDICTS, "output": "o.csv", "metrics_port": 0},
        "metrics_port=0 has no use with mode=predict; it serves a run",
    ),
    ({"train_steps": 5, "warmup_steps": 5}, "warmup_steps=5 leaves nothing of train_steps=5; use fewer"),
    ({"train_steps": 6, "warmup_steps": 5}, ""),
    ({"warmup_steps": 5}, ""),
    ({**PREDICTS, "output": "o.csv", "train_steps": 5, "warmup_steps": 5}, ""),
    (
        {"global_batch_size": 4, "accumulate_steps": 5},
        "accumulate_steps=5 is more than the 4 examples of global_batch_size",
    ),
    ({"global_batch_size": 4, "accumulate_steps": 4}, ""),
    ({"global_batch_size": 4, "accumulate_steps": 5, "set_by_data": frozenset(["global_batch_size"])}, ""),
    (
        {"sync_every_steps": 4, "precision": "float16"},
        "precision=float16 can't be combined with sync_every_steps=4, whose",
    ),
    ({"sync_every_steps": 4, "precision": "bfloat16"}, ""),
    ({"precision": "float16"}, ""),
    (
        {"sync_every_steps": 4, "ema_decay": 0.5},
        "ema_decay=0.5 can't be combined with sync_every_steps=4, whose replicas",
    ),
    ({"ema_decay": 0.5}, ""),
    ({"sync_every_steps": 4, "strategy": "tpu"}, "strategy=tpu can't be combined with sync_every_steps=4"),
    ({"strategy": "tpu"}, ""),
    (
        {**EVALUATED, "restore_best": True},
        "restore_best takes the best evaluation's weights, and the evaluator keeps it",
    ),
    ({**TRAINS, "restore_best": True}, "restore_best takes the best evaluation's weights, and mode=train makes no"),
    ({"restore_best": True}, ""),
    ({**TRAINS, "eval_batches": 2}, "eval_batches=2 has no use with mode=train, which makes no evaluations; use"),
    ({**EVALUATED, "eval_batches": 2}, ""),
    ({"eval_batches": 2}, ""),
    ({**EVALUATED, "eval_every_steps": 2}, "eval_every_steps=2: the evaluator evaluates each checkpoint; use"),
    ({**TRAINS, "eval_every_steps": 2}, "eval_every_steps=2: mode=train makes no evaluations; use mode=train_and_eval"),
    ({"eval_every_steps": 2}, ""),
    (
        {**EVALUATED, **WATCHES},
        "early_stopping watches monitor=eval_loss, and the evaluator's are not known to the run;",
    ),
    (
        {**TRAINS, **PLATEAU},
        "reduce_lr watches monitor=eval_loss, and mode=train makes no evaluations; use monitor=train",
    ),
    ({**TRAINS, **WATCHES, "monitor": "train_loss"}, ""),
    ({**WATCHES, "eval_every_steps": 0}, "early_stopping watches monitor=eval_loss, and eval_every_steps=0 makes none"),
    ({**WATCHES, **PLATEAU}, ""),
    ({"eval_every_steps": 0}, ""),
    (FOLLOWS, ""),
    ({**FOLLOWS, "eval_checkpoint": "best"}, "follow evaluates each checkpoint, and eval_checkpoint=best is one; give"),
    (
        {**FOLLOWS, "cluster": task()},
        "follow is for one process beside a run, and there are 4; leave their addresses out",
    ),
    ({**FOLLOWS, "remote": REMOTE}, "run_dir=gs://b/r is copied here as a process begins, and follow looks for"),
    (
        {**PREDICTS, "output": "o.csv", "eval_checkpoint": "all"},
        "eval_checkpoint=all is for mode=eval, and mode=predict",
    ),
    ({"eval_checkpoint": "all"}, ""),
    (
        {"tensorboard_dir": "gs://b/t"},
        "a tensorboard_dir or export_dir in a bucket is copied with the run's folder; give",
    ),
    ({"export_dir": "gs://b/t"}, "a tensorboard_dir or export_dir in a bucket is copied with the run's folder; give"),
    ({"tensorboard_dir": "gs://b/t", "remote": REMOTE}, ""),
    ({"tensorboard_dir": "/t", "export_dir": "/e"}, ""),
    (
        {**PREDICTS, "output": "o.csv", "export_dir": "/e"},
        "export_dir=/e has no use with mode=predict; use mode=export",
    ),
    (
        {"export_dir": "/e", "cluster": task()},
        "export_dir is for a run of one process, and there are 4; use mode=export",
    ),
    (
        {"mode": "export", "run_dir": "/r", "cluster": task()},
        "mode=export is done by one process, and there are 4; give",
    ),
    ({"mode": "export", "run_dir": "/r"}, ""),
    (PREDICTS, "mode=predict needs output=FILE, one of .csv, .parquet, .npz"),
    ({**PREDICTS, "output": "o.txt"}, "output=o.txt ends in .txt; give a file of predictions one of the endings .csv,"),
    ({**PREDICTS, "output": "o"}, "output=o ends in nothing; give a file of predictions one of the endings"),
    ({**PREDICTS, "output": "a.b/o.npz"}, ""),
]


@pytest.mark.parametrize(("values", "line"), CASES)
def test_settings_that_do_not_go_together_are_one_line_and_others_none(values, line):
    with pytest.raises(UsageError, match=f"^{re.escape(line)}") if line else contextlib.nullcontext():
        conflicts.refuse(Config(**values), conflicts.CONFLICTS)


def test_each_conflict_has_a_case():
    met = {next((line for holds, line in conflicts.CONFLICTS if holds(Config(**values))), None) for values, _ in CASES}
    assert met == {None, *(line for _, line in conflicts.CONFLICTS)}
