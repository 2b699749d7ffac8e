"""The flags of `crankshaft train` for benchmark mode."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from . import rules
from .groups import group

BENCHMARK_PARTS = ("whole", "step", "input", "reduce", "checkpoint", "update", "all")


def define() -> None:
    """Defines the flags, after those that say what is measured."""
    bench = group("Benchmark mode", for_all=("mode", "benchmark"))
    bench(rules.whole, "benchmark_steps", None, "Steps that a round times, in place of a time.", lower=1)
    bench(
        rules.number,
        "benchmark_seconds",
        None,
        "A round times steps for about so long; 3 if neither is given.",
        above=0,
        upper=1e6,
    )
    bench(rules.whole, "benchmark_rounds", 3, "Rounds, one after another.", lower=1)
    bench(
        flags.DEFINE_enum,
        "benchmark_part",
        "whole",
        "What is timed: the whole loop, one part of it in isolation, or all: the whole and what each part takes of it.",
        enum_values=BENCHMARK_PARTS,
    )
    _define_runs(bench)


def _define_runs(bench: Callable) -> None:
    """Defines the flags of several runs, and of what is done with results."""
    bench(
        flags.DEFINE_bool,
        "profile",
        False,
        "Write a TensorBoard trace of ten steps, and name the ten most expensive ops.",
    )
    bench(rules.path, "baseline", None, "A result of before (--result_json) to compare with.")
    bench(
        rules.text,
        "baseline_cmd",
        None,
        "A command to compare with, run in turn with this one: A B A B.",
        wants="a command",
    )
    bench(
        rules.number,
        "fail_below",
        None,
        "Exit with 3 if the rate is shown to be below this times the baseline's.",
        lower=0,
        upper=1e6,
    )
