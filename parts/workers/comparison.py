"""Compares what tasks must have alike, before they compute together: settings, versions, variables, traced steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from ...engine import logging, version
from ...engine.checks import digests
from ...engine.errors import CrankshaftError, RunError, UsageError, reason

_CURE = "start all with the same script and packages"
_MAY_PASS = (RunError, OSError, MemoryError, tf.errors.OpError)  # the next time
_Made = TypeVar("_Made")


def made_by_all(what: str, make: Callable[[], _Made], value: Callable[[_Made], Any], strategy) -> tuple[_Made, list]:
    """Returns what `make` returns, and all workers' values of it; if it raises on one worker, all raise.

    Args:
      what: its name, for messages.
    """
    try:
        made = make()
    except Exception as error:
        with contextlib.suppress(tf.errors.OpError):  # of a peer that is lost, which may be why
            line = error.message if isinstance(error, CrankshaftError) else f"{type(error).__name__}: {reason(error)}"
            strategy.exchange([[line, isinstance(error, _MAY_PASS)], None])
        raise
    answers = strategy.exchange([None, value(made)])
    for worker, (failure, _) in zip(strategy.host_names, answers, strict=True):
        if failure is not None:
            line, may_pass = failure
            raise (RunError if may_pass else UsageError)(f"{worker} can't make {what}: {line}")
    return made, [answer for _, answer in answers]


def refuse_variables(variables: Sequence[str], strategy) -> None:
    """Raises `UsageError` on all workers, which have made other variables; each describes its own."""
    shown, _ = _first_difference(variables, str, strategy)
    raise refused(f"workers make different variables, first {_by_task(shown, strategy.host_names)}; {_CURE}", strategy)


def check_step(kind: str, step: digests.StepDigest, values: Sequence[str], strategy) -> None:
    """Raises `UsageError`, on all workers, where they have traced steps of different digests.

    Of different builds it only logs the difference: a step may change in an upgrade.

    Args:
      kind: kind of the step: training or evaluation.
      values: all workers' digests.
    """
    if len({*values}) == 1:
        return
    hashes, ops = zip(*step.ops, strict=True)
    shown, builds = _first_difference(hashes, lambda hashed: digests.describe(ops[hashes.index(hashed)]), strategy)
    line = f"workers compute different {kind} steps, first {_by_task(shown, strategy.host_names)}"
    if len({*builds}) == 1:
        raise refused(f"{line}; {_CURE}", strategy)
    if strategy.is_chief:
        logging.warning("%s, by different builds", line)


def _first_difference(items: Sequence[str], describe: Callable[[str], str], strategy) -> tuple[list[str], list[str]]:
    """Returns each worker's item at the first position at which they differ, as it describes it; and its build."""
    lists = strategy.exchange(items)
    pairs = enumerate(itertools.zip_longest(*lists))
    first = next((number for number, (item, *others) in pairs if any(other != item for other in others)), len(items))
    shown = describe(items[first]) if first < len(items) else "no further one"
    answers = strategy.exchange([shown, version.described()])
    return [line for line, _ in answers], [build for _, build in answers]


def refused(line: str, strategy) -> UsageError:
    """Makes an error that all workers raise, once none of them waits for another's answer any more."""
    with contextlib.suppress(tf.errors.OpError):
        strategy.exchange()
    return UsageError(line)


def differences(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Describes each value that differs between tasks, whose settings these are, and the tasks that have it."""
    lines = []
    for name in sorted(set().union(*settings.values())):
        shown = [str(values.get(name)) for values in settings.values()]
        if len({*shown}) > 1:
            lines.append(f"{name} {_by_task(shown, settings)}")
    return lines


def _by_task(answers: Iterable[str], tasks: Iterable[str]) -> str:
    """Describes tasks' answers, each once, with those who gave it."""
    found: dict[str, list[str]] = {}
    for task, answer in zip(tasks, answers, strict=True):
        found.setdefault(answer, []).append(task)
    return ", ".join(f"{answer} at {' and '.join(who)}" for answer, who in found.items())
