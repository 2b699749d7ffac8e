"""Makes a run's configuration of flags' values, the run that is read, and the cluster that is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from ...engine import logging
from ..failures import UsageError, print_line
from ..host.remote import RemoteFolder
from . import config as configs
from . import following, parsing, paths, registry, saved_config, user_files
from .flags import USES, Flags


def configure(
    given: Mapping[str, Any],
    trainer_class: type | None,
    has_data: bool,
    environment: Mapping[str, str],
    script_flags: Mapping[str, Any] | None = None,
    given_script_flags: Collection[str] = (),
    owns_process: bool = True,
    remote: RemoteFolder | None = None,
    may_be_endless: bool = False,
    set_by_data: Collection[str] = (),
    discovery: ModuleType | None = None,
    to_trainer: Callable[[ModuleType], type | None] | None = None,
) -> configs.Config:
    """Makes the configuration from flags' values; imports nothing that they name. Raises `UsageError`.

    Args:
      given: the values, of a command line or of a call, each in its flag's type.
      trainer_class: the user's own Trainer, or None: then --model names one.
      has_data: whether the user's script brings its data: then --input is not needed.
      environment: the process's variables, where a cluster is described.
      script_flags: the values of the script's own flags that decide a run's numbers, by name.
      given_script_flags: names of those that the caller gives; the others are a run's that is read.
      may_be_endless: whether a run without a length has no end; else it has the default one.
      discovery: `parts.clusters.discovery`, if the process may have other tasks.
      to_trainer: makes a Trainer of the compiled Keras model that --model=FILE may have; see `launch.program`.
    """
    effective = {**vars(Flags()), **_programs_settings(given, trainer_class), **given}
    script, from_run = dict(script_flags or {}), dict[str, Any]()
    if remote:
        effective["run_dir"] = remote.folder
    paths.check(effective)
    follows = effective["follow"] and effective["mode"] == "eval" and effective["eval_checkpoint"] == "all"
    if follows and effective["run_dir"] and not remote:  # by itself, whatever its environment says of a cluster
        environment, effective["gpus"] = {}, effective["gpus"] or "none"
        following.await_checkpoint(effective["run_dir"], print_line)
    if effective["mode"] in configs.READING:
        is_alone = discovery is None or not discovery.has_tasks(effective, environment)
        from_run, script_in_run = saved_config.values_from_run(given, effective, is_alone)
        effective |= from_run
        before, chosen = from_run.get("data_dir"), effective["eval_data_dir"]
        is_moved = before and chosen and not paths.is_pattern(before) and not os.path.exists(before)
        if is_moved and effective["mode"] in ("eval", "predict") and effective["predict_split"] in (None, "eval"):
            logging.warning("data_dir=%s of the run is not there, and not needed: %s alone is read", before, chosen)
            effective["data_dir"] = chosen
        script |= {
            name: value for name, value in script_in_run.items() if name in script.keys() - {*given_script_flags}
        }
        if trainer_class is None and effective["model"] is None:
            saved_config.refuse_without_model(effective["run_dir"], effective["mode"])
    cluster = None
    if discovery:
        effective["strategy"], cluster = discovery.cluster_from_flags(given, effective, environment)
    if cluster and cluster.job("evaluator") and effective["mode"] == "train_and_eval":
        if "mode" in given:
            raise UsageError(
                "mode=train_and_eval evaluates within the run, as the evaluator does beside it; use mode=train, or "
                "leave the evaluator out"
            )
        effective["mode"] = "train"
    _check_uses(given, effective)
    _check_names(effective, trainer_class, has_data)
    name = effective["optimizer"]
    effective["optimizer"] = user_files.whole_name("optimizer", name if user_files.is_own(name) else name.lower())
    has_length = effective["train_steps"] is not None or effective["train_epochs"] is not None
    if effective["train_steps"] is not None and effective["train_epochs"] is not None:
        raise UsageError("train_steps and train_epochs are both given; use one of them")
    if not has_length:
        effective["train_epochs"] = 10.0
    for (
        name
    ) in configs.PERIODS:  # a default becomes a multiple of the sync period, which a value of the caller's has to be
        if effective[name] and name not in given:
            effective[name] = configs.whole_periods(effective[name], effective["sync_every_steps"])
    return configs.Config(
        **effective,
        program_trainer=trainer_class,
        cluster=cluster,
        script_flags=dict(sorted(script.items())),
        owns_process=owns_process,
        remote=remote,
        is_endless=may_be_endless and not has_length,
        from_run=frozenset(from_run),
        set_by_data=frozenset(set_by_data),
        to_trainer=to_trainer,
    )


def _programs_settings(given: Mapping[str, Any], trainer_class: type | None) -> dict[str, Any]:
    """Returns the flags that the program has set in TensorFlow or Keras, as their defaults. Raises `UsageError`."""
    if not {"keras", "tensorflow"} <= sys.modules.keys():
        return {}
    from ...engine.internals.tensorflow import numerics_check

    return {"check_numerics": numerics_check() is not None, **_precision_of_policy(given, trainer_class)}


def _precision_of_policy(given: Mapping[str, Any], trainer_class: type | None) -> dict[str, str]:
    """Returns the precision that Keras's global policy names, if the program has set one. Raises `UsageError`.

    A run that is read has its own. A compiled model's layers have their policies already.
    """
    if getattr(trainer_class, "default_policy", None) is not None:
        return {}
    from ...engine.internals.keras_state import default_policy

    precision = (policy := default_policy().name).removeprefix("mixed_")
    if policy not in ("mixed_bfloat16", "mixed_float16"):
        if policy != "float32":
            logging.warning(
                "Keras's policy %s is not used: a Trainer's layers compute by precision; set mixed_bfloat16 or "
                "mixed_float16, or leave it out",
                policy,
            )
        return {}
    if given.get("precision", precision) != precision:
        raise UsageError(
            f"precision={given['precision']} is given, and the program has set Keras's policy {policy}; leave one of "
            "them out"
        )
    return {"precision": precision}


def _check_names(effective: Mapping[str, Any], trainer_class: type | None, has_data: bool) -> None:
    """Raises `UsageError` for a model or an input that is missing, unknown, or beside the script's own."""
    if trainer_class is None and not has_data and effective["model"] is effective["input"] is None:
        models, inputs = (", ".join(registry.NAMES[kind]) for kind in ("model", "input"))
        raise UsageError(
            f"model and input are missing; use e.g. model=mlp input=digits: there are the models {models}, and the "
            f"inputs {inputs}"
        )
    if trainer_class is None:
        registry.check_name("model", effective["model"])
    elif effective["model"] not in (None, trainer_class.__name__):
        raise UsageError(
            f"model={effective['model']} is given, but this script trains {trainer_class.__name__}; omit it"
        )
    if trainer_class and not has_data and not effective["input"]:
        raise UsageError(
            f"data is missing for {trainer_class.__name__}; give data=(train, eval), or a function that returns it, or "
            f"name an input: {', '.join(registry.NAMES['input'])}"
        )
    if not has_data or effective["input"]:
        registry.check_name("input", effective["input"])


def _check_uses(given: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
    """Raises `UsageError` for the first flag of the caller's that the run would ignore.

    Args:
      effective: the run's, of all flags: a caller may leave some to the run that is read.
    """
    defaults = vars(Flags())
    for name, (other, *choices) in USES.items():
        value = given.get(name, defaults[name])
        is_never = name.endswith("_every_steps") and value == 0  # 0 is obeyed everywhere
        if value == defaults[name] or is_never:
            continue
        words = " ".join(f"{name}={word.partition('=')[2]}" for word in parsing.to_words({name: value}))
        if not choices and effective[other] == defaults[other]:
            raise UsageError(f"{words} has no use without {other}; give that too, or leave {name} out")
        if choices and effective[other] not in choices:
            fix = " or ".join(f"{other}={choice}" for choice in choices)
            raise UsageError(f"{words} has no use with {other}={effective[other]}; use {fix}, or leave {name} out")
