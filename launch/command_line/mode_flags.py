"""The flags of modes that read a run: evaluation, export, generation. Nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from . import rules

flags.disclaim_key_flags()  # as in rules.py

EXPORT_FORMATS = ("saved_model", "keras")


def define(modes: Callable, enum: Callable) -> None:
    """Defines those of evaluation and export in their group, which `modes` does with each; `enum` is absl's."""
    modes(
        rules.text,
        "eval_checkpoint",
        "latest",
        "eval, export, generate: latest, best, all, or a step.",
        wants="latest, best, all, or a step",
        rule=rules.matching(r"latest|best|all|\d+", "it is no step either"),
        only=("mode", "eval", "export", "generate"),
    )
    modes(
        rules.path,
        "export_dir",
        None,
        "export: where the model goes; run_dir/export if not given.",
        only=("mode", "export"),
    )
    modes(
        enum,
        "export_format",
        "saved_model",
        "export: a SavedModel with a serving signature, or a .keras file of Trainer.model.",
        enum_values=EXPORT_FORMATS,
        only=("mode", "export"),
    )


def define_generation(generation: Callable) -> None:
    """Defines those of generation likewise."""
    generation(
        rules.text,
        "prompt",
        "",
        "What the text begins with; nothing: as a document begins.",
        wants="text",
        may_be_empty=True,
    )
    generation(rules.whole, "tokens", 200, "Tokens that follow it, at most: a document may end before.", lower=1)
    generation(
        rules.number,
        "temperature",
        0.8,
        "Above 1 less likely tokens come more often, below 1 more seldom; 0 always takes the likeliest.",
        lower=0,
        upper=1000,
    )
    generation(rules.whole, "top_k", 40, "Draw from so many of the likeliest tokens; 0 is all.", lower=0)
