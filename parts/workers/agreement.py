"""Compares the settings of workers that train together, before the first step, and names the differences.

Workers that differ would train nonsense, or wait for each other for ever. Tasks with parameter servers compare only
their versions and the data they read (`parts/parameter_servers/sources.py`): the chief's flags alone decide.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine import logging, version
from ...engine.checkpoints.manifest import FORMAT
from ...engine.data.feeds.combined import Combined
from ...engine.data.streamed import is_part
from ...engine.hooks import Hook
from ...engine.machine import environment, files
from ...runner.command_line.config import Config
from ...runner.command_line.flags import FLAG_INFO
from ...runner.command_line.values import short
from ...runner.failures import UsageError
from ...runner.host.locks import can_lock
from ...runner.host.process import VECTOR_WIDTH
from ...runner.host.signals import EXIT_CODES
from ...runner.saved import fingerprints
from .comparison import differences, refused

_OPTION = "AutoShardPolicy.OFF in its options"
# Variables by which TensorFlow computes with other kernels, so that it rounds otherwise.
_KERNELS = ("ONEDNN_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS")


def check_settings(config: Config, splits: Mapping[str, Any], strategy, hooks: Sequence[Hook] = ()) -> None:
    """Raises `UsageError`, on all workers, where flags, versions, hooks or the layout of the data differ.

    Args:
      splits: splits of the data, by name, as `fingerprints.fingerprint` takes them.
      hooks: the user's hooks.
    """
    # Of a folder, whose name may differ between hosts, only whether there is one.
    flags: dict[str, Any] = {
        name: bool(value) if FLAG_INFO[name].may_be_elsewhere else value
        for name, value in config.as_json()["flags"].items()
        if not FLAG_INFO[name].may_differ
    }
    flags |= config.deciding()
    script_flags = flags.pop("script_flags", {})
    versions = {name: environment.versions()[name] for name in ("tensorflow", "keras")}
    settings = {
        **flags,
        **script_flags,
        **{f"Keras's {name}": value for name, value in config.keras_defaults.items()},
        **versions,
        "the format of checkpoints": FORMAT,
        **{f"the {name} data": fingerprints.layout(split) for name, split in splits.items()},
        "hooks that end calls:": [schedule for hook in hooks if (schedule := hook.schedule())],
    }
    _check(settings, strategy)
    # A task that starts again may have a newer build, which continues the same run.
    if (builds := _differences({"crankshaft": version.described()}, strategy)) and strategy.is_chief:
        logging.warning(
            "workers run different code: %s; install the same everywhere, unless it is an upgrade", builds[0]
        )
    words = {name: os.environ.get(name, "").split() for name in _KERNELS}
    # Without paths, and what the run itself has set by the CPU.
    kernels = {name: [w for w in found if "/" not in w and VECTOR_WIDTH not in w] for name, found in words.items()}
    if (lines := _differences(kernels, strategy)) and strategy.is_chief:
        logging.warning("workers may round differently: %s; set the same everywhere", "; ".join(lines))


def check_run_dir(run_dir: str, strategy) -> bool:
    """Raises `UsageError`, on all workers, where one of them does not see the folder that the chief writes to.

    Logs where the chief's lock on it does not hold; returns whether it holds here.
    """
    name = f".seen-by-all.{secrets.token_hex(8)}.tmp"
    # All look for a file of the chief's random name: one that another job has left must not be taken for it.
    path = os.path.join(run_dir, strategy.exchange(name)[0])
    if strategy.is_chief:
        files.make_empty(path)
    strategy.exchange()  # nobody looks before it is there
    is_seen = files.appears(path)
    found = strategy.exchange([is_seen, is_seen and not strategy.is_chief and can_lock(run_dir)])
    blind = [worker for worker, (sees, _) in zip(strategy.host_names, found, strict=True) if not sees]
    unlocked = [worker for worker, (_, locks) in zip(strategy.host_names, found, strict=True) if locks]
    if strategy.is_chief:  # not earlier: by the exchange above all have looked
        os.remove(path)
    if blind:
        raise UsageError(
            f"run_dir={run_dir} is another folder at {' and '.join(blind)} than at the chief, which writes the "
            "checkpoints that all resume from; give a folder of a file system that all hosts share"
        )

    if unlocked and strategy.is_chief:
        logging.warning(
            "run_dir=%s: the chief's lock on it does not hold at %s, so a second job there would write to it too; "
            "mount it without local_lock, nolock or localflock",
            *(run_dir, " and ".join(unlocked)),
        )
    return strategy.host_names[strategy.host] not in unlocked


def check_examples(splits: Mapping[str, Any], strategy, policy: str, are_passed: bool = False) -> None:
    """Raises `UsageError`, on all workers, where arrays or datasets differ, which would be divided once more.

    Args:
      policy: see `engine.data.streamed.divide`.
      are_passed: whether they are passed to a call, rather than the run's own.
    """
    members = {name: split.members if isinstance(split, Combined) else {"": split} for name, split in splits.items()}
    splits = {f"{name} {key}".rstrip(): split for name, parts in members.items() for key, split in parts.items()}
    samples = {name: {} if is_part(split, policy) else fingerprints.sample(split) for name, split in splits.items()}
    all_samples = strategy.exchange(samples)
    chief = strategy.host_names[0]
    for name in splits:
        by_host = dict(zip(strategy.host_names, (samples[name] for samples in all_samples), strict=True))
        if not (others := [host for host, sample in by_host.items() if fingerprints.differs(by_host[chief], sample)]):
            continue
        lengths = [sample.get("length", -1) for sample in by_host.values()]
        counts = f" ({', '.join(map(str, lengths))} examples)" if len({*lengths}) > 1 and min(lengths) >= 0 else ""
        own = "examples of its own, open the run with" if are_passed else f"its own part of a dataset, set {_OPTION} or"
        raise refused(
            f"the {name} data of {' and '.join(others)} differs from {chief}'s{counts}, and the run divides it among "
            f"workers itself: give all workers the whole data, in the same order; or, if each gives {own} "
            "auto_shard_policy=off",
            strategy,
        )


def check_data(data: Mapping[str, Mapping[str, int]], strategy) -> None:
    """Raises `UsageError`, on all workers, where fingerprints differ in the number of examples or the ids' numbering.

    Where only contents differ, which may be another CPU's rounding, the chief warns.
    """
    counts = {
        f"{name} of the {split} data": numbers.get(name)
        for split, numbers in data.items()
        for name in ("examples", "ids")
    }
    _check(counts, strategy)
    digests = {f"the {split} data": numbers["digest"] for split, numbers in data.items()}
    for line in _differences(digests, strategy):
        if strategy.is_chief:
            logging.warning(
                "workers have as many examples, of other contents (%s); give all of them the same data, in the same "
                "order, unless it is their CPUs that round otherwise",
                line,
            )


def compare_calls(call: str, strategy) -> str | None:
    """Raises `UsageError`, on all workers, where one of them makes another call of their run than the others.

    Returns the signal that ends one of them, by the name in its `call`; None without one.
    """
    calls = strategy.exchange(call)
    if signals := [call for call in calls if call in EXIT_CODES]:
        return signals[0]
    if len(set(calls)) > 1:
        by_host = ", ".join(f"{call} by {worker}" for worker, call in zip(strategy.host_names, calls, strict=True))
        raise UsageError(f"workers make different calls of their run: {by_host}; have all make the same, in one order")
    return None


def _check(settings: Mapping[str, Any], strategy) -> None:
    if lines := _differences(settings, strategy):
        raise refused(f"workers have different settings: {'; '.join(lines)}; give all the same", strategy)


def _differences(settings: Mapping[str, Any], strategy) -> list[str]:
    """Describes each value that differs, and the workers that have it."""
    answers = [json.loads(text) for text in strategy.exchange(json.dumps(settings, sort_keys=True, default=str))]
    shown = [{name: short(value) for name, value in values.items()} for values in answers]
    return differences(dict(zip(strategy.host_names, shown, strict=True)))
