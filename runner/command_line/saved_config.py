"""Reads the configuration of a saved run, and what a call that reads the run takes from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ...engine import logging
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.machine.files import read_json
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE
from ...engine.strategies.registry import CLUSTERED
from ..failures import UsageError
from . import registry, user_files
from .flags import ARGUMENTS, DECIDING, FIELDS, FLAG_INFO, Flags, flags_with, replaced_by
from .rules import coerce
from .values import short, shown

# Flags that a call which reads a run does not take from it: its own value, or the default, applies.
PER_CALL_FLAGS = flags_with(lambda flag: flag.of_call)
FIX = (
    "restore it from a copy (a checkpoint's manifest has the same under 'about'), or use another run_dir; the "
    "checkpoints are as they were"
)
# Flags that mean nothing with another input, model, optimizer, schedule or strategy.
_BELONGS_TO = {
    "input": ("input_arg", "data_dir", "eval_data_dir"),
    "model": ("model_arg",),
    "optimizer": ("optimizer_arg",),
    "learning_rate_schedule": ("learning_rate_schedule_arg",),
    "strategy": ("num_virtual_devices", "mesh", "shard_optimizer"),
}


def load(run_dir: str) -> dict[str, Any] | None:
    """Reads the configuration that a run_dir was made with; None if it has none. Raises `UsageError`."""
    path = RunDir(run_dir).config
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path, parse_constant=str)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}); {FIX}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); {FIX}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {shown(content)}, which is not an object; {FIX}")
    return check(path, content)


def check(source: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a run's flags, those that decide, and Keras's defaults, as config.json and each manifest have them.

    Runs of earlier versions are without these defaults.

    Raises:
      UsageError: a part, or a model's or input's arguments, are not an object; `source` names the file.
    """
    keras = {"keras": saved["keras"]} if "keras" in saved else {}
    for part in ("flags", "deciding", *keras):
        if not isinstance(saved.get(part), dict):
            problem = f"has {part}={shown(saved[part])}, which is not an object" if part in saved else f"has no {part}"
            raise UsageError(f"{source} {problem}; {FIX}")
    # A flag that is gone decides nothing if it was off or had today's behavior. A flag that did not decide
    # when the run began keeps the value that it had; one that did not exist has its default.
    is_off = {name: not value or value == WEIGHT_DECAY_EXCLUDE for name, value in saved["deciding"].items()}
    deciding = {name: value for name, value in saved["deciding"].items() if name in FLAG_INFO or not is_off[name]}
    deciding = {**{name: saved["flags"].get(name, vars(Flags())[name]) for name in DECIDING}, **deciding}
    for name in ARGUMENTS & deciding.keys():
        if not isinstance(arguments := deciding[name] or {}, dict):
            raise UsageError(f"{source} has {name}={shown(arguments)}, which is not an object; {FIX}")
        entry = registry.ENTRIES.get(name)
        deciding[name] = {**entry.defaults, **arguments} if entry else arguments
    return {"flags": saved["flags"], "deciding": deciding, **keras}


def values_from_run(
    given: Mapping[str, Any], effective: Mapping[str, Any], is_alone: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads, of the run at run_dir, the values that the caller does not give, and those of the script's own flags.

    `is_alone`: whether no other tasks are known.
    """
    if not effective["run_dir"]:
        raise UsageError(f"mode={effective['mode']} needs run_dir, the folder of a run")
    if not os.path.isdir(effective["run_dir"]):
        raise UsageError(f"run_dir={effective['run_dir']} does not exist; give the folder of a run")
    saved = load(effective["run_dir"])
    if not saved:
        return {}, {}
    given_names = {*given, *PER_CALL_FLAGS}
    if effective["follow"] or (saved["flags"].get("strategy") in CLUSTERED and is_alone):
        given_names.add("strategy")  # one process can read what several have written
    before = {**saved["flags"], **saved["deciding"]}  # "deciding" names the model of a script too
    for name, dependents in _BELONGS_TO.items():
        now, then = (str(user_files.portable_name(value)).lower() for value in (effective[name], before.get(name)))
        if name in given_names and now != then:
            given_names |= set(dependents)  # the run's belong to another model, input, ...
    given_names |= replaced_by(given_names)
    path = RunDir(effective["run_dir"]).config
    # A mode that reads a run applies no optimizer, and imports none.
    from_run = without_places(path, typed_values(path, saved, effective.keys() - given_names), {"optimizer"})
    if not isinstance(script_flags := saved["deciding"].get("script_flags", {}), dict):
        raise UsageError(f"{path} has script_flags={shown(script_flags)}, which is not an object; {FIX}")
    if from_run.get("restore_best", effective["restore_best"]) and "eval_checkpoint" not in given:
        from_run["eval_checkpoint"] = "best"  # which the run has ended with
    return from_run, script_flags


def typed_values(path: str, saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Converts those of a run's flags that `names` lists to their types. Raises `UsageError`."""
    try:
        values = {
            name: None if value is None and FIELDS[name].default is None else coerce(FIELDS[name], value)
            for name, value in saved["flags"].items()
            if name in names
        }
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}; {FIX}") from None
    return values


def without_places(source: str, values: Mapping[str, Any], given_names: Collection[str] = ()) -> dict[str, Any]:
    """Leaves out of a run's values the folder that an input would write to, and logs that.

    Raises:
      UsageError: they name code that the caller has not named.
    """
    user_files.refuse_unnamed_code(source, values, given_names)
    if folder := (values.get("input_arg") or {}).get("prepared_dir"):
        logging.warning(
            "%s: prepared_dir=%s is not taken from a run, as it is written to; to use it, give all of input_arg again",
            source,
            short(folder),
        )
    return without_cache_folder(values)


def without_cache_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the folder of what an input prepares, which decides no numbers."""
    if arguments := values.get("input_arg"):
        values = {**values, "input_arg": {n: value for n, value in arguments.items() if n != "prepared_dir"}}
    return {**values}


def refuse_without_model(run_dir: str, mode: str) -> None:
    """Raises `UsageError` for a folder without a run, or with the run of a script's model."""
    if not (saved := load(run_dir)):
        raise UsageError(f"run_dir={run_dir} holds no run (no {NAMES.config}); give the folder of a run")
    trainer = saved["deciding"].get("model")
    raise UsageError(
        f"run_dir={run_dir} is a run of {trainer}, which its script brings; start that script with mode={mode}"
    )
