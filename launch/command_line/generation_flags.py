"""The flags of text that a language model goes on with. Nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from crankshaft.launch.command_line import rules

flags.disclaim_key_flags()  # as in rules.py


def define(generation: Callable) -> None:
    """Defines the flags in their group, which `generation` does with each."""
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
