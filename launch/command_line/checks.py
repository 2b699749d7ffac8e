"""Checks a configuration: before TensorFlow starts what can be checked by then, and afterwards what flags name."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.metrics.monitored import Monitored
from ..cluster import discovery, rendezvous, resources
from ..errors import UsageError
from ..host import process
from . import config as configs
from . import paths, registry, rules
from .config import KERAS_FILES, Config
from .flags import ARGUMENTS
from .values import differences, plain

PREDICTION_FILES = (".csv", ".parquet", ".npz")  # by their endings


def check(config: Config) -> None:
    """Raises `UsageError` for the first mistake found, within a second: imports nothing that flags name.

    Waits only for hosts whose names do not resolve yet.
    """
    process.refuse_within_import()
    if config.max_restarts and not config.owns_process:
        raise UsageError(
            f"max_restarts={config.max_restarts} is for programs with a command line; leave it out, or use "
            "crankshaft.main"
        )
    if config.cluster:
        discovery.arrive(config.cluster, config.cluster_timeout_seconds, awaits=not config.min_workers)
        rendezvous.check_bindable(config.cluster)
    check_strategy(config)
    _check_metrics(config)
    _check_amounts(config)
    _check_sync_periods(config)
    _check_rollback(config)
    _check_monitor(config)
    if config.mode in configs.READING:
        _check_checkpoints(config)
    if config.run_dir:
        _check_run_dir(config)
    paths.check_results(config.values)
    for flag in registry.ENTRIES:
        config.configured_arguments(flag)
    if config.mode == "export":
        _check_export(config)
    if config.mode == "predict":
        _check_predictions(config)
    _check_init_from(config)
    if config.mode == "generate":
        check_generation(config)
    if config.mode not in configs.WITHOUT_DATA:
        _check_data_dirs(config)


def _check_metrics(config: Config) -> None:
    if config.bind and config.cluster is None and config.metrics_port is None:
        raise UsageError(f"bind={config.bind} has no use without several tasks or metrics_port; leave it out")
    if config.metrics_port is not None and not config.trains:
        line = f"metrics_port={config.metrics_port} has no use with mode={config.mode}"
        raise UsageError(f"{line}; it serves a run that trains, so leave it out")
    if config.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("metrics_port needs prometheus_client; pip install 'crankshaft[monitor]'")


def check_named(config: Config) -> None:
    """Imports what flags name, and TensorFlow with it; raises `UsageError` where their arguments do not fit.

    Or where a run was begun with others.
    """
    for flag in ARGUMENTS:
        config.configured_arguments(flag)
    if config.run_dir and (before := configs.read(config.run_dir)):
        _check_fitted(config, before)
        check_same_run(config, f"run_dir={config.run_dir}", before)
    if config.eval_data_dir and not (config.input_entry and config.input_entry.reads_eval_data):
        name = config.input_entry.name if config.input_entry else "the script's data"
        raise UsageError(
            f"eval_data_dir={config.eval_data_dir} is not read by {name}; leave it out, or choose an input of files, "
            "such as tfrecord"
        )


def decide(config: Config, by_data: Mapping[str, Any]) -> None:
    """Sets the flags that waited for the data, and makes the checks that did.

    Args:
      config: of the run.
      by_data: the flags' values by name.

    Raises:
      UsageError: they can't be used with the other flags.
    """
    for name in config.awaited & by_data.keys():
        setattr(config, name, by_data[name])
    config.awaited = frozenset()
    check_strategy(config)
    _check_amounts(config)


def _check_fitted(config: Config, before: Mapping[str, Any]) -> None:
    """Raises `UsageError` for arguments that would have no effect, since a trained run's preprocessing is used."""
    entry, known = config.input_entry, config.trained_on
    if not (entry and known and (known.preprocessing.columns or known.tokens)):
        return
    arguments = (plain(entry.defaults) | each["input_arg"] for each in (before["deciding"], config.deciding()))
    if changed := differences(*({name: each[name] for name in entry.fitted} for each in arguments)):
        raise UsageError(
            f"the preprocessing of run_dir={config.run_dir} was fitted with another input_arg ({'; '.join(changed)}), "
            "and is not fitted again; use the run's value, or another run_dir"
        )


def _check_data_dirs(config: Config) -> None:
    for flag in ("data_dir", "eval_data_dir"):
        path = config.values[flag]
        if path and not re.search(r"[,*?\[]|^[a-z0-9]+://", path) and not os.path.exists(path):
            raise UsageError(f"{flag}={path} does not exist; give the folder that holds the input's files")


def _check_export(config: Config) -> None:
    if config.cluster:
        raise UsageError(
            f"mode=export is done by one process, and there are {len(config.cluster.addresses)}; give one of them "
            "strategy=one_device"
        )
    path = config.output_path
    if (ending := os.path.splitext(path)[1]) not in ("", ".keras") and not os.path.isdir(path):
        raise UsageError(
            f"output={path} ends in {ending}, and an export is a folder or a .keras file; give one, or a / at the end "
            "of a folder of this name"
        )
    _check_output(path, folder=ending != ".keras")


def _check_predictions(config: Config) -> None:
    if not config.output:
        raise UsageError(f"mode=predict needs output=FILE, one of {', '.join(PREDICTION_FILES)}")
    if (ending := os.path.splitext(config.output)[1]) not in PREDICTION_FILES:
        raise UsageError(
            f"output={config.output} ends in {ending or 'nothing'}; give a file of predictions one of the endings "
            f"{', '.join(PREDICTION_FILES)}"
        )
    if ending == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            f"output={config.output} is written by pyarrow; pip install 'crankshaft[parquet]', or write .csv or .npz"
        )
    if config.is_chief:
        _check_output(config.output)


def _check_output(path: str, folder: bool = False) -> None:
    """Raises `UsageError` where a file is there already, or can't be made; or, of a folder, none can be made in it."""
    if not folder and os.path.lexists(path):
        raise UsageError(f"output: {path} exists; remove it or use another output")
    if not folder and not os.path.isdir(os.path.dirname(path)):
        raise UsageError(
            f"output={path}: the folder {os.path.dirname(path)} does not exist; make it or correct the path"
        )
    paths.check_writable("output", path if folder else os.path.dirname(path))


def check_generation(config: Config) -> None:
    """Raises `UsageError` where a run's replicas can't generate."""
    if config.strategy in ("tpu", "parameter_server"):
        raise UsageError(
            f"rows of tokens that grow can't be read with strategy={config.strategy}; generate with mode=generate "
            "strategy=one_device"
        )


def check_batch(config: Config, replicas: int) -> None:
    """Raises `UsageError` if a batch does not divide over the replicas, naming the nearest that do."""
    if _is_divided(config, replicas):
        return
    below = config.global_batch_size // replicas * replicas
    near = " or ".join(str(n) for n in (below, below + replicas) if n)
    raise UsageError(
        f"global_batch_size={config.global_batch_size} does not divide over {replicas} replicas; use {near}"
    )


def _is_divided(config: Config, replicas: int) -> bool:
    return "global_batch_size" in config.awaited or config.global_batch_size % replicas == 0


def check_tables(config: Config, model: str) -> None:
    """Raises `UsageError` where a model's embedding tables can't be trained."""
    if config.strategy == "tpu":
        raise UsageError(
            f"strategy=tpu: {model} holds embedding tables, of which a step updates a few rows, and XLA has no kernels "
            "for that; use strategy=one_device, mirrored, multi_worker or parameter_server"
        )
    if config.shard_optimizer:
        raise UsageError(
            f"shard_optimizer: {model} holds embedding tables, of which a step updates a few rows, and replicas would "
            "exchange them whole; leave it out, or cut them over servers by strategy=parameter_server"
        )


def check_strategy(config: Config) -> None:
    """Raises `UsageError` for flags of where a run's steps are computed that can't be combined."""
    if config.is_evaluator and not config.run_dir:
        raise UsageError("an evaluator finds its checkpoints in run_dir; give the run's")
    if config.is_evaluator and config.remote:
        raise UsageError(
            f"run_dir={config.remote.url} is copied here as a process begins, and an evaluator looks for checkpoints "
            "that come later; use mode=train_and_eval without one, or a folder that all tasks share"
        )
    mesh = rules.mesh_shape(config.mesh)
    if config.strategy == "multi_worker" and not mesh:
        check_batch(config, config.cluster.num_workers)
    if config.min_workers:
        _check_min_workers(config)
    if config.strategy == "parameter_server":
        _check_servers(config)
    virtual = config.num_virtual_devices
    if virtual:
        check_batch(config, mesh.get("data") or max(1, virtual // mesh.get("model", 1)))
        if virtual > 1 and config.jit == "on":
            raise UsageError(f"jit=on needs one replica, and there are {virtual}; use jit=auto or off")
    if mesh.get("model", 1) > 1:
        _check_shared_out(config, f"mesh={config.mesh}")
    if config.shard_optimizer:
        _check_shared_out(config, "shard_optimizer")
    if config.jit == "on" and config.no_jit_reason:
        raise UsageError(f"jit=on: {config.no_jit_reason}; use jit=auto or off")


def fits(config: Config, workers: int) -> bool:
    """Returns whether the batch, and a mesh, divide over the replicas of so many workers with GPUs as here."""
    own, mesh = config.gpu_numbers, rules.mesh_shape(config.mesh)
    gpus = len(resources.visible_gpus(os.environ) if own is None else own)
    data, left = divmod(workers * max(1, gpus), mesh.get("model", 1))
    return data > 0 and not left and mesh.get("data", data) == data and _is_divided(config, data)


def _check_min_workers(config: Config) -> None:
    """Raises `UsageError` where a job can't continue without some of its workers."""
    flag, workers = f"min_workers={config.min_workers}", config.cluster.num_workers
    if not config.max_restarts or config.cluster.is_chosen:
        raise UsageError(
            f"{flag} is for workers that start again in their places, each on its host; give max_restarts to "
            "crankshaft train or crankshaft.main (crankshaft local always starts all of its workers again)"
        )
    if not (config.run_dir and config.trains) or config.remote:
        raise UsageError(
            f"{flag} needs a run that trains and has run_dir on a file system that all workers share, whose lock "
            "decides which of them continue"
        )
    if config.auto_shard_policy == "file":
        raise UsageError(
            f"{flag}: auto_shard_policy=file divides files by the number of workers, so with fewer the order is "
            "another; use auto_shard_policy=data"
        )
    if not any(fits(config, number) for number in range(config.min_workers, workers)):
        raise UsageError(
            f"{flag}: no number of workers from {config.min_workers} to {workers - 1} divides "
            f"global_batch_size={config.global_batch_size}; change one of them"
            if config.min_workers < workers
            else f"{flag}: there are {workers} workers; give fewer than that"
        )


def _check_shared_out(config: Config, flag: str) -> None:
    """Raises `UsageError` for options that a model or an update sharded over replicas can't be combined with."""
    for name, unlike, why in (
        ("powersgd_rank", 0, "compresses the gradients of whole matrices"),
        ("sync_every_steps", 1, "lets replicas train by themselves, and those that share out a model can't"),
    ):
        if (value := config.values[name]) > unlike:
            raise UsageError(f"{flag} does not go with {name}={value}, which {why}; leave one out")
    if config.remote and config.strategy == "multi_worker":
        raise UsageError(
            f"{flag}: workers write parts of one checkpoint, and each has run_dir={config.remote.url} in a copy of its "
            "own; use a folder that all of them see"
        )


def _check_servers(config: Config) -> None:
    _ = config.placement_rules  # reads the rules, and so finds their mistakes
    if config.reduce_dtype == "float16":
        raise UsageError(
            "reduce_dtype=float16 has no room for the small gradients of a mean, which is what workers push; use "
            "bfloat16"
        )


def _check_amounts(config: Config) -> None:
    if config.trains and config.train_steps and config.warmup_steps >= config.train_steps:
        raise UsageError(
            f"warmup_steps={config.warmup_steps} leaves nothing of train_steps={config.train_steps}; use fewer"
        )
    if "global_batch_size" not in config.awaited and config.accumulate_steps > config.global_batch_size:
        raise UsageError(
            f"accumulate_steps={config.accumulate_steps} is more than the {config.global_batch_size} examples of "
            "global_batch_size; use fewer"
        )


def _check_sync_periods(config: Config) -> None:
    """Checks that nothing needs replicas to be equal between syncs (--sync_every_steps), where they differ."""
    steps = config.sync_every_steps
    if steps == 1:
        return
    apart = f"sync_every_steps={steps}, whose replicas differ between syncs"
    for name in configs.PERIODS:
        if (period := config.values[name]) and period % steps:
            above = configs.whole_periods(period, steps)
            near = " or ".join(str(n) for n in (above - steps, above) if n)
            raise UsageError(f"{name}={period} is not a multiple of {apart}; use {near}")
    for name, unlike in (("precision", "float16"), ("ema_decay", config.ema_decay), ("strategy", "tpu")):
        if config.values[name] and config.values[name] == unlike:
            raise UsageError(f"{name}={unlike} can't be combined with {apart}; leave one of them out")
    if config.powersgd_rank:
        raise UsageError(
            f"powersgd_rank={config.powersgd_rank} is of sums in each step, and sync_every_steps={steps} makes none; "
            "leave one of them out"
        )


def _check_rollback(config: Config) -> None:
    if not (config.rollbacks and config.trains):
        return
    rollback = f"on_nonfinite={config.on_nonfinite}"
    if not config.run_dir:
        raise UsageError(f"{rollback} returns to checkpoints, which are in run_dir; give one")
    for name, unlike, why in (
        ("strategy", "parameter_server", "whose workers' steps can't be repeated"),
        ("sync_every_steps", config.sync_every_steps > 1 and config.sync_every_steps, "which sums no step alone"),
        ("check_numerics", config.check_numerics, "which ends a run within a step"),
    ):
        if unlike and config.values[name] == unlike:
            raise UsageError(f"{rollback} can't be combined with {name}={unlike}, {why}; leave one of them out")


def _check_monitor(config: Config) -> None:
    monitored = Monitored.parse(config.monitor)
    if config.restore_best and config.mode == "train":
        evaluates = (
            "the evaluator keeps it in best/"
            if config.cluster and config.cluster.job("evaluator")
            else "mode=train makes no evaluations; use mode=train_and_eval"
        )
        raise UsageError(f"restore_best takes the best evaluation's weights, and {evaluates}")
    if config.eval_batches and config.mode == "train" and not (config.cluster and config.cluster.job("evaluator")):
        raise UsageError(
            f"eval_batches={config.eval_batches} has no use with mode=train, which makes no evaluations; use "
            "mode=train_and_eval, or leave eval_batches out"
        )
    if config.eval_every_steps and config.mode == "train":
        evaluates, instead = (
            "mode=train makes no evaluations",
            "use mode=train_and_eval, or leave the flag out",
        )
        if config.cluster and config.cluster.job("evaluator"):
            evaluates, instead = "the evaluator evaluates each checkpoint", "use checkpoint_every_steps"
        raise UsageError(f"eval_every_steps={config.eval_every_steps}: {evaluates}; {instead}")
    if monitored.source == "train" or config.mode not in ("train", "train_and_eval"):
        return
    if config.mode == "train":
        why, instead = "mode=train makes no evaluations", " or mode=train_and_eval"
        if config.cluster and config.cluster.job("evaluator"):
            why, instead = "the evaluator's are not known to the run", ""
    elif config.eval_every_steps == 0:
        why, instead = "eval_every_steps=0 makes none before the end", " or evaluate more often"
    else:
        return
    for flag in ("early_stopping", "reduce_lr"):
        if getattr(config, flag):
            raise UsageError(
                f"{flag} watches monitor={config.monitor}, and {why}; use "
                f"monitor={dataclasses.replace(monitored, source='train')}{instead}"
            )


def check_without_evaluation(config: Config) -> None:
    """Raises `UsageError` for options that need evaluation data, if the data has none."""
    give = "return (train, eval) from the data function, or use validation_split=0.1"
    if config.mode == "eval" or config.is_evaluator:
        purpose = "an evaluator" if config.is_evaluator else "mode=eval"
        raise UsageError(f"{purpose} needs evaluation data, and the data has none; {give}")
    if config.mode != "train_and_eval":
        return
    if config.eval_every_steps or config.restore_best:
        purpose = "restore_best" if config.restore_best else f"eval_every_steps={config.eval_every_steps}"
        raise UsageError(f"{purpose} needs evaluation data, and the data has none; {give}")
    monitored = Monitored.parse(config.monitor)
    watching = [flag for flag in ("early_stopping", "reduce_lr") if config.values[flag]]
    if monitored.source == "eval" and (watching or monitored.metric != "loss"):
        who = f"{watching[0]} watches monitor" if watching else "monitor"
        raise UsageError(
            f"{who}={config.monitor}, and the run has no evaluation data; use "
            f"monitor={dataclasses.replace(monitored, source='train')}, or {give}"
        )


def _check_checkpoints(config: Config) -> None:
    """Checks that the run has checkpoints to evaluate or export; reading them shows whether they are complete."""
    which = config.eval_checkpoint
    if which == "all" and config.mode != "eval":
        raise UsageError(
            f"eval_checkpoint=all is for mode=eval, and mode={config.mode} takes one; give latest, best or a step"
        )
    steps = checkpoint_steps(config.run_dir, which)
    if not steps:
        raise UsageError(f"run_dir={config.run_dir} has no checkpoint in {NAMES.folder(which)}/; train first")
    if which not in ("latest", "best", "all", *map(str, steps)):
        raise UsageError(f"eval_checkpoint={which} is none of latest, best, all, {', '.join(map(str, steps))}")


def checkpoint_steps(run_dir: str, which: str = "latest") -> list[int]:
    """Returns what `RunDir.steps` does. Raises `UsageError`."""
    layout = RunDir(run_dir)
    try:
        return layout.steps(which)
    except OSError as error:
        raise UsageError(
            f"{layout.folder(which)} can't be read ({error.strerror}); make it readable to this user"
        ) from None


def _check_init_from(config: Config) -> None:
    source = config.init_from
    others = [name for name in ("init_optimizer", "init_map") if config.values[name]]
    if others and (len(others) > 1 or (source or "").endswith(KERAS_FILES)):
        raise UsageError(
            f"init_from={source} can't be combined with {' and '.join(others)}: init_optimizer continues a run's "
            "checkpoint, init_map renames variables of a tf.train.Checkpoint, and a Keras file has weights alone; "
            "leave one out"
        )
    if not source or check_init_from(source):
        return
    if config.run_dir and checkpoint_steps(config.run_dir):
        return  # by now the run has its own weights
    raise UsageError(
        f"init_from={source} does not exist; give a run's folder, a checkpoint, .../ckpt-1000, or Keras's .keras or "
        ".weights.h5"
    )


def check_init_from(source: str) -> bool:
    """Returns whether a path has weights. Raises `UsageError` if a file there can't be read as weights."""
    if source.endswith((".h5", ".hdf5")) and not source.endswith(KERAS_FILES):
        raise UsageError(
            f"init_from={source} is in Keras's older format; load it with Keras, and save it as .weights.h5 or .keras"
        )
    there = [path for path in (source, f"{source}.index") if os.path.exists(path)]
    for path in there:
        if not os.path.isdir(path):
            paths.opened("init_from", path, "give a run's folder, a checkpoint, .../ckpt-1000, or Keras's file").close()
    return bool(there)


def _check_run_dir(config: Config) -> None:
    layout = RunDir(config.run_dir)
    if config.trains:
        paths.check_writable("run_dir", config.run_dir)
        for folder in (layout.checkpoints, layout.best):
            if os.path.islink(folder):  # another run may write there, and its lock is not ours
                raise UsageError(
                    f"run_dir: {folder} is a link to {os.readlink(folder)}, and a run writes and removes checkpoints "
                    "in its own folder alone; make all of run_dir a link, or use another"
                )
            if os.path.lexists(folder):
                paths.check_writable("run_dir", folder)
    configs.read(config.run_dir)
    for path in (layout.model, layout.events, layout.result) if config.trains else ():
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(
                f"run_dir: {path} is not a regular file, and the run is to write one there; move it elsewhere, or use "
                "another run_dir"
            )


def check_same_run(config: Config, source: str, before: Mapping[str, Any]) -> None:
    """Raises `UsageError` where a run was begun with other values of flags that decide its numbers.

    Args:
      config: of this call.
      source: the name of the file that has the run's own configuration.
      before: as `config.saved_settings` returns it.
    """
    if config.allow_changed_config or config.mode == "benchmark":
        return
    then, now = before["deciding"], config.deciding()
    if "keras" in before:  # else of a run before they were kept
        then, now = then | {"keras": before["keras"]}, now | {"keras": config.keras}
    if "script_flags" not in then:
        now.pop("script_flags", None)  # of a run before they were kept
    # Of generating, the seed is of the samples alone. What the data decides is compared when it is restored.
    for name in ("seed",) if config.mode == "generate" else config.awaited & now.keys():
        now[name] = then[name]
    if config.mode == "predict":  # which needs no labels
        then, now = ({**each, "input_arg": {**each["input_arg"], "label": None}} for each in (then, now))
    if changed := differences(then, now):
        raise UsageError(
            f"{source} is a run of another configuration ({'; '.join(changed)}); use another run_dir, the same flags, "
            "or allow_changed_config"
        )
