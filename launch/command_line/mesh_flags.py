"""The flags of models that are large for a device: what replicas share out, what is kept. TensorFlow is not started."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from . import rules

flags.disclaim_key_flags()  # as in rules.py

_MESHES = ("strategy", "mirrored", "multi_worker")


def define(where: Callable, boolean: Callable) -> None:
    """Defines the flags in a group, which `where` does with each; `boolean` is absl's."""
    where(
        rules.text,
        "mesh",
        None,
        "Replicas as data:D,model:M: layers of engine.parallel are cut over M of them; without it each has all.",
        wants="data:D,model:M",
        rule=rules.mesh,
        only=_MESHES,
    )
    where(
        boolean,
        "shard_optimizer",
        False,
        "Each replica keeps the optimizer's slots of a part of the weights, and updates that (ZeRO, stage 1).",
        only=_MESHES,
    )
    where(
        boolean,
        "recompute",
        False,
        "The model's blocks are computed again in the backward pass: less memory for activations, a third more work.",
    )
