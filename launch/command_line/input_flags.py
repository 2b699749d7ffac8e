"""The flags of the input: where examples come from, and in which order. Nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from . import rules

flags.disclaim_key_flags()  # as in rules.py

AUTO_SHARD_POLICIES = ("auto", "file", "data", "hint", "off")


def define(data: Callable) -> None:
    """Defines the flags in their group, which `data` does with each."""
    data(
        rules.text, "input", None, "One that comes with Crankshaft, or a .py file with a function load.", **rules.MODULE
    )
    data(
        rules.repeated, "input_arg", [], "NAME=VALUE for the input, e.g. examples=10000. Repeatable.", **rules.ARGUMENT
    )
    data(rules.files, "data_dir", None, "Where the input's files are: a folder, a glob, or several with commas.")
    data(rules.files, "eval_data_dir", None, "Where those to evaluate on are, for an input that takes them apart.")
    data(rules.whole, "global_batch_size", 64, "Examples an update, over all replicas.", lower=1)
    data(
        rules.number, "validation_split", 0.0, "Share of the training data, its end, to evaluate on.", lower=0, upper=1
    )
    data(rules.whole, "eval_batch_size", 512, "Examples an evaluation step, over all replicas.", lower=1)
    data(rules.whole, "resident_data_mb", 1024, "Arrays up to so many MiB are kept on each device.", lower=0)
    data(
        rules.whole,
        "shuffle_window",
        0,
        "Shuffle chunks of files, then examples within so many chunks; 0: single examples where they are read well.",
        lower=0,
        upper=1 << 20,
    )
    data(rules.whole, "max_bad_records", 0, "Examples in files that can't be read and are left out.", lower=0)
    data(rules.whole, "shuffle_buffer", 10_000, "Examples in the shuffle buffer of a tf.data.Dataset.", lower=1)
    data(
        flags.DEFINE_enum,
        "auto_shard_policy",
        "auto",
        "How workers divide a tf.data.Dataset: by files, or each reads all, and takes its rows; auto: files if enough.",
        enum_values=AUTO_SHARD_POLICIES,
    )
