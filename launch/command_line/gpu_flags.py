"""The flags of GPUs: which of them, and how much of their memory. Nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from . import rules

flags.disclaim_key_flags()  # as in rules.py


def define(where: Callable, text: Callable, boolean: Callable) -> None:
    """Defines the flags in a group, by its functions that define a flag of each kind."""
    where(
        text,
        "gpus",
        None,
        "Numbers of the GPUs to use, e.g. 0,1, or none; all if not given (one_device: the first).",
        wants="GPUs' numbers, or none",
        rule=rules.matching(r"none|\d{1,4}(,\d{1,4})*", "it is no list of GPUs' numbers; use e.g. 0,1, or none"),
    )
    where(boolean, "gpu_memory_growth", True, "Take a GPU's memory as it is needed, not all of it at the start.")


def numbers(given: str | None) -> tuple[int, ...] | None:
    """Returns --gpus as numbers, () for none; None where the flag is not given."""
    if not given:
        return None
    return () if given == "none" else tuple(map(int, given.split(",")))
