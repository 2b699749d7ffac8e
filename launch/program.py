"""Makes and checks the configuration of a program that calls Crankshaft; finds the other tasks of its run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from absl import flags

from ..engine import logging
from ..engine.checkpoints.run_dir import NAMES
from ..engine.strategies.registry import CLUSTERED
from ..runner.command_line import checks, configuring, parsing
from ..runner.command_line.config import Config
from ..runner.command_line.flags import Flags
from ..runner.host import forks
from ..runner.host.remote import remote_folder
from ..runner.host.tasks import SCHEDULERS

_SECRET = re.compile(r"(.*_)?(password|secret|token|credential|credentials|api_key)", re.IGNORECASE)  # a flag's name


def configure_program(
    given: Mapping[str, Any],
    script_values: Mapping[str, Any],
    trainer_class: type | None,
    has_data: bool,
    may_change: Collection[str],
    **options: Any,
) -> Config:
    """Configures a program that calls Crankshaft; its script may define flags. Raises `UsageError`.

    `script_values` are those of the script's flags for this run alone; the flags named by `may_change` do not decide a
    run's numbers. The rest is as in `configure`.
    """
    script = {name: flags.FLAGS[name] for name in parsing.script_flag_names()}
    values = {name: script_values.get(name, flag.value) for name, flag in script.items()}
    for name, value in values.items() if given.get("run_dir") else ():
        if value and isinstance(value, str) and _SECRET.fullmatch(name):
            logging.warning(
                "the script's flag %s will be readable in the run's files and on its page; if it is a secret, have the "
                "script read it from the environment",
                name,
            )
    return configure(
        given,
        trainer_class,
        has_data,
        os.environ,
        {name: values[name] for name in values.keys() - set(may_change)},
        given_script_flags=[name for name, flag in script.items() if name in script_values or flag.present],
        remote=remote_folder(
            given.get("run_dir"),
            {NAMES.tensorboard: given.get("tensorboard_dir"), NAMES.export: given.get("export_dir")},
        ),
        **options,
    )


def configure(
    given: Mapping[str, Any],
    trainer_class: type | None,
    has_data: bool,
    environment: Mapping[str, str],
    *options: Any,
    **more: Any,
) -> Config:
    """Makes the configuration from flags' values (`configuring.configure`), and looks for other tasks.

    Raises `UsageError`.
    """
    discovery: ModuleType | None = None
    if _may_have_tasks({**vars(Flags()), **given}, environment):
        from ..parts.clusters import discovery
    more |= {"discovery": discovery, "to_trainer": to_trainer}
    return configuring.configure(given, trainer_class, has_data, environment, *options, **more)


def _may_have_tasks(effective: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Returns whether a flag or a variable says that the run may have several tasks."""
    is_asked = effective["strategy"] in CLUSTERED or effective["task_index"] is not None
    by_flags = any(effective[name] for name in ("cluster_hosts", "num_ps", "evaluator"))
    return is_asked or by_flags or any(name in environment for name in ("TF_CONFIG", *SCHEDULERS))


def to_trainer(module: ModuleType) -> type | None:
    """Makes a Trainer of a file's function `model`, which makes a compiled Keras model; None without one."""
    if hasattr(module, "model"):
        from ..parts.keras_models.keras_trainer import KerasTrainer

        return KerasTrainer.for_module(module)
    return None


def check(config: Config) -> None:
    """Raises `UsageError` for the first mistake found, within a second: imports nothing that flags name.

    Waits only for hosts whose names do not resolve yet, and lets the other tasks of a cluster know of a mistake.
    """
    forks.refuse_within_import()
    with contextlib.ExitStack() as stack:
        if config.cluster:
            from ..parts.clusters import arrival, rendezvous

            stack.enter_context(rendezvous.refusing(config.cluster))
        checks.check_flags(config)
        if config.cluster:
            arrival.arrive(config.cluster, config.cluster_timeout_seconds, awaits=not config.min_workers)
        checks.check(config)
