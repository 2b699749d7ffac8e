"""Checks a configuration: before TensorFlow starts what can be checked by then, and afterwards what flags name."""

from __future__ import annotations

import importlib.util
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine import logging
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ..failures import UsageError
from . import config as configs
from . import conflicts, paths, registry, rules, saved_config
from .config import KERAS_FILES, Config, visible_gpus
from .flags import ARGUMENTS
from .values import differences, plain


def check_flags(config: Config) -> None:
    """Raises `UsageError` for flags that can't be combined, and for a library that one of them needs."""
    conflicts.refuse(config, conflicts.CONFLICTS)
    if config.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("metrics_port needs prometheus_client; pip install prometheus_client")


def check(config: Config) -> None:
    """Raises `UsageError` for the first mistake found, within a second: imports nothing that flags name."""
    check_placement(config)
    for name in configs.PERIODS:
        if (period := config.values[name]) and period % config.sync_every_steps:
            above = configs.whole_periods(period, config.sync_every_steps)
            near = " or ".join(str(steps) for steps in (above - config.sync_every_steps, above) if steps)
            raise UsageError(
                f"{name}={period} is not a multiple of sync_every_steps={config.sync_every_steps}, whose replicas "
                f"differ between syncs; use {near}"
            )
    if config.mode in configs.READING:
        which = config.eval_checkpoint
        steps = checkpoint_steps(config.files.path, which)  # whether they are complete, reading them shows
        if not steps:
            other = "latest" if which == "best" else "best"
            fix = f"use eval_checkpoint={other}" if checkpoint_steps(config.files.path, other) else "train first"
            raise UsageError(f"run_dir={config.run_dir} has no checkpoint in {NAMES.folder(which)}/; {fix}")
        if which not in ("latest", "best", "all", *map(str, steps)):
            raise UsageError(f"eval_checkpoint={which} is none of latest, best, all, {', '.join(map(str, steps))}")
    if config.run_dir:
        _check_run_dir(config)
    paths.check_results(config.values)
    for flag in registry.ENTRIES:
        config.configured_arguments(flag)
    if config.mode == "export":
        _check_export(config, "output", config.output_path)
    if config.export_dir and config.trains:
        _check_export(config, "export_dir", config.output_path)
    if config.mode == "predict":
        if config.output_path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            raise UsageError(
                f"output={config.output} is written by pyarrow; pip install pyarrow, or write .csv or .npz"
            )
        if config.is_chief:
            _check_output("output", config.output_path)
    source = config.init_from
    # A run that has checkpoints has its own weights by now.
    if source and not check_init_from(source) and not (config.run_dir and checkpoint_steps(config.run_dir)):
        raise UsageError(
            f"init_from={source} does not exist; give a run's folder, a checkpoint, .../ckpt-1000, or Keras's "
            ".keras or .weights.h5"
        )
    if config.mode == "generate":
        check_generation(config)
    if config.mode not in configs.WITHOUT_DATA:
        for flag in ("data_dir", "eval_data_dir"):
            path = config.values[flag]
            if path and not paths.is_pattern(path) and not os.path.exists(path):
                raise UsageError(f"{flag}={path} does not exist; give the folder that holds the input's files")


def check_named(config: Config) -> None:
    """Imports what flags name, and TensorFlow with it; raises `UsageError` where their arguments do not fit.

    Or where a run was begun with others.
    """
    for flag in ARGUMENTS:
        config.configured_arguments(flag)
    if config.run_dir and (before := saved_config.load(config.run_dir)):
        _check_fitted(config, before)
        check_same_run(config, f"run_dir={config.run_dir}", before)
    if config.eval_data_dir and not (config.input_entry and config.input_entry.reads_eval_data):
        name = config.input_entry.name if config.input_entry else "the script's data"
        raise UsageError(
            f"eval_data_dir={config.eval_data_dir} is not read by {name}; leave it out, or choose an input of files, "
            "such as tfrecord"
        )


def apply_data_flags(config: Config, by_data: Mapping[str, Any]) -> None:
    """Sets the flags that the data sets, in `config` itself, and checks it again. Raises `UsageError`."""
    for name in config.set_by_data & by_data.keys():
        setattr(config, name, by_data[name])
    config.set_by_data = frozenset()
    conflicts.refuse(config, conflicts.CONFLICTS)
    check_placement(config)


def _check_fitted(config: Config, before: Mapping[str, Any]) -> None:
    """Raises `UsageError` for arguments that would have no effect, since a trained run's preprocessing is used."""
    entry, trained_on = config.input_entry, config.trained_on
    if not (entry and trained_on and (trained_on.preprocessing.columns or trained_on.tokens)):
        return
    then, now = (plain(entry.defaults) | values["input_arg"] for values in (before["deciding"], config.deciding()))
    if changed := differences(*({name: values[name] for name in entry.fitted} for values in (then, now))):
        raise UsageError(
            f"the preprocessing of run_dir={config.run_dir} was fitted with another input_arg ({'; '.join(changed)}), "
            "and is not fitted again; use the run's value, or another run_dir"
        )


def _check_export(config: Config, flag: str, path: str) -> None:
    if (ending := os.path.splitext(path)[1]) not in ("", ".keras") and not os.path.isdir(path):
        raise UsageError(
            f"{flag}={path} ends in {ending}, and an export is a folder or a .keras file; give one, or a / at the end "
            "of a folder of this name"
        )
    _check_output(flag, path, folder=ending != ".keras")
    if since := config.export_since:
        if ending == ".keras":
            raise UsageError(f"export_since={since} can't be combined with output={path}; give output a folder")
        if importlib.util.find_spec("pyarrow") is None:
            raise UsageError(f"export_since={since} is read by pyarrow; pip install pyarrow")
        if not os.path.isdir(os.path.join(since, "tables")):
            raise UsageError(
                f"export_since={since} has no folder tables/; give the folder of an earlier export, .../export/STEP, "
                "of a model whose tables have admit_after"
            )


def _check_output(flag: str, path: str, folder: bool = False) -> None:
    """Raises `UsageError` where a file is there already, or can't be made; or, of a folder, none can be made in it."""
    if not folder and os.path.lexists(path):
        raise UsageError(f"{flag}: {path} exists; remove it or use another {flag}")
    if not folder and not os.path.isdir(os.path.dirname(path)):
        raise UsageError(
            f"{flag}={path}: the folder {os.path.dirname(path)} does not exist; make it or correct the path"
        )
    paths.check_writable(flag, path if folder else os.path.dirname(path))


def check_generation(config: Config) -> None:
    """Raises `UsageError` where a run's replicas can't generate."""
    if config.strategy in ("tpu", "parameter_server"):
        raise UsageError(
            f"sequences of tokens that grow can't be read with strategy={config.strategy}; generate with mode=generate "
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
    return "global_batch_size" in config.set_by_data or config.global_batch_size % replicas == 0


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


def check_placement(config: Config) -> None:
    """Raises `UsageError` for flags of where a run's steps are computed that can't be combined."""
    conflicts.refuse(config, conflicts.PLACEMENT_CONFLICTS)
    mesh = rules.mesh_shape(config.mesh)
    if config.strategy == "multi_worker" and not mesh:
        check_batch(config, config.tasks.num_workers)
    if config.min_workers and not any(fits(config, n) for n in range(config.min_workers, config.tasks.num_workers)):
        raise UsageError(
            f"min_workers={config.min_workers}: no number of workers from {config.min_workers} to "
            f"{config.tasks.num_workers - 1} divides global_batch_size={config.global_batch_size}; change one of them"
        )
    if config.strategy == "parameter_server":
        _ = config.placement_rules  # reads the rules, and so finds their mistakes
    if virtual := config.num_virtual_devices:
        check_batch(config, mesh.get("data") or max(1, virtual // mesh.get("model", 1)))


def fits(config: Config, workers: int) -> bool:
    """Returns whether the batch, and a mesh, divide over the replicas of so many workers with GPUs as here."""
    gpus: Sequence | None = config.gpu_numbers
    mesh = rules.mesh_shape(config.mesh)
    if gpus is None:
        gpus = visible_gpus(os.environ)
    data, left = divmod(workers * max(1, len(gpus)), mesh.get("model", 1))
    return data > 0 and not left and mesh.get("data", data) == data and _is_divided(config, data)


def checkpoint_steps(run_dir: str, which: str = "latest") -> list[int]:
    """Lists the steps of a run's checkpoints, as `RunDir.steps` does. Raises `UsageError`."""
    layout = RunDir(run_dir)
    try:
        return layout.steps(which)
    except OSError as error:
        raise UsageError(
            f"{layout.folder(which)} can't be read ({error.strerror}); make it readable to this user"
        ) from None


def check_init_from(source: str) -> bool:
    """Returns whether a path has weights. Raises `UsageError` if a file there can't be read as weights."""
    if source.endswith((".h5", ".hdf5")) and not source.endswith(KERAS_FILES):
        raise UsageError(
            f"init_from={source} is in Keras's older format; load it with Keras, and save it as .weights.h5 or .keras"
        )
    there = [path for path in (source, f"{source}.index") if os.path.exists(path)]
    for path in there:
        if not os.path.isdir(path):
            paths.open_file(
                "init_from", path, "give a run's folder, a checkpoint, .../ckpt-1000, or Keras's file"
            ).close()
    return bool(there)


def _check_run_dir(config: Config) -> None:
    layout = config.files
    if config.trains:
        paths.check_writable("run_dir", layout.path)
        mode, group = (status := os.stat(layout.path)).st_mode, status.st_gid
        has_begun = os.path.lexists(layout.model) or os.path.lexists(layout.checkpoints)
        is_shared = mode & stat.S_IWGRP and group != os.getegid() and not has_begun
        if config.is_chief and (mode & stat.S_IWOTH or is_shared):
            who = "each user of this machine" if mode & stat.S_IWOTH else f"group {group}"
            logging.warning(
                "run_dir=%s may be written to by %s (mode %o), who can exchange its files and end the run; unless they "
                "are to, chmod go-w %s",
                *(layout.path, who, stat.S_IMODE(mode), shlex.quote(layout.path)),
            )
        if config.tensorboard_dir:
            paths.check_writable("tensorboard_dir", config.tensorboard)
        for folder in (layout.checkpoints, layout.best):
            if os.path.islink(folder):  # another run may write there, and its lock is not ours
                raise UsageError(
                    f"run_dir: {folder} is a link to {os.readlink(folder)}, and a run writes and removes checkpoints "
                    "in its own folder alone; make all of run_dir a link, or use another"
                )
            if os.path.lexists(folder):
                paths.check_writable("run_dir", folder)
    saved_config.load(layout.path)
    for path in (layout.model, layout.events, layout.result) if config.trains else ():
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(
                f"run_dir: {path} is not a regular file, and the run is to write one there; move it elsewhere, or use "
                "another run_dir"
            )


def check_same_run(config: Config, source: str, before: Mapping[str, Any]) -> None:
    """Raises `UsageError` where a run was begun with other values of flags that decide its numbers.

    Args:
      source: the name of the file that has the run's own configuration.
      before: as `saved_config.check` returns it.
    """
    if config.allow_changed_config or config.mode == "benchmark":
        return
    then, now = before["deciding"], config.deciding()
    if "keras" in before:  # else of a run before they were kept
        then, now = then | {"keras": before["keras"]}, now | {"keras": config.keras_defaults}
    for name in ("model_arg", "input_arg"):  # an argument that did not exist when the run began has its default
        then = {**then, name: {**plain(config.entry(name).defaults), **then[name]}}
    if "script_flags" not in then:
        now.pop("script_flags", None)  # the run is older than this entry
    elif theirs := {name: value for name, value in then["script_flags"].items() if name in config.script_flags}:
        then = {**then, "script_flags": theirs}
    else:  # those that the script has no more, or that may change, decide nothing now
        then.pop("script_flags")
    # Of generating, the seed is of the samples alone. What the data decides is compared when it is restored.
    for name in ("seed",) if config.mode == "generate" else config.set_by_data & now.keys():
        now[name] = then[name]
    schedules = [values["learning_rate_schedule"] for values in (then, now)]
    if not all(schedule in configs.SCHEDULES_TO_THE_END for schedule in schedules):  # the length decides by these alone
        then, now = ({**values, "train_steps": None, "train_epochs": None} for values in (then, now))
    if config.mode == "predict":  # which needs no labels
        then, now = ({**values, "input_arg": {**values["input_arg"], "label": None}} for values in (then, now))
    if changed := differences(*map(saved_config.without_cache_folder, (then, now))):
        raise UsageError(
            f"{source} is a run of another configuration ({'; '.join(changed)}); use another run_dir, the same flags, "
            f"or allow_changed_config{_may_change(then, now)}"
        )


def _may_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The cure for script's own flags that have changed, if they decide no numbers."""
    theirs, ours = (values.get("script_flags", {}) for values in (then, now))
    changed = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return f"; of a flag that decides no numbers, may_change={changed} of main and run" if changed else ""
