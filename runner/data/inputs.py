"""A run's data on its strategy: checked, fingerprinted, and with the feeds that bring it to replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from ...engine.checkpoints import Manifest, RunDir
from ...engine.checkpoints.run_dir import NAMES
from ...engine.data import form
from ...engine.data.buckets import LengthBuckets
from ...engine.data.feeds import combined
from ...engine.data.feeds.combined import Combined
from ...engine.data.feeds.feed import Feed
from ...engine.data.order import Order, Origin
from ...engine.data.run_data import Data
from ...engine.data.source import Source, Spec, Split, unknown_dimensions
from ...engine.data.streamed import Endless, Stream
from ...engine.hooks import Hook
from ...engine.randomness import seed_after
from ...engine.strategies.base import Strategy
from ...input.checks import InputError
from ..command_line import checks, conflicts, registry, rules
from ..command_line.config import Config
from ..command_line.flags import Flags
from ..command_line.values import short
from ..failures import UsageError
from ..saved import fingerprints, model_file, preprocessor
from . import loading

_DEFAULTS = Flags()
_BATCH_FLAGS = ("global_batch_size", "bucket_by", "seed", "shuffle_buffer", "shuffle_window")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A run's data, on its strategy.

    Attributes:
      data_info: the description of the data, without its examples.
      example: a batch of one example, zeros, in the form of the data.
      splits: the examples, as `Data.splits`.
      feeds: feeds that bring batches of them to replicas, by the splits' names.
      contents: fingerprints of the splits, by their names.
      faster: a line for people whose steps wait for input: the change that makes it faster.
      lines: description of how the data is read, for people.
      updates_before: updates of an existing Keras model before the first attempt, see `KerasTrainer.updates_before`.
      lock_holds: whether all processes share the run's folder, and the chief's lock on it holds in this one.
    """

    data_info: Data
    example: Any
    splits: Mapping[str, Source | Stream] = dataclasses.field(default_factory=dict)
    feeds: Mapping[str, Feed] = dataclasses.field(default_factory=dict)
    contents: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    faster: str = ""
    lines: Sequence[str] = ()
    updates_before: int = 0
    lock_holds: bool = False

    @property
    def evaluation(self) -> Source | Stream | None:
        """The evaluation data, of several sets the first; None without."""
        return next((split for name, split in self.splits.items() if name != "train"), None)

    @property
    def evaluation_feeds(self) -> dict[str, Feed]:
        """The feeds of evaluation data: of one set by "", of several by name."""
        return {name.partition("/")[2]: feed for name, feed in self.feeds.items() if name != "train"}

    @property
    def order(self) -> Order | None:
        """That of the training data; None where no data is read."""
        return self.feeds["train"].order if "train" in self.feeds else None


def build(
    config: Config,
    data: Data,
    strategy: Strategy,
    hooks: Sequence[Hook] | None = None,
    agreement: ModuleType | None = None,
) -> Inputs:
    """Checks a run's data, which must be equal on all workers, and makes its feeds.

    Args:
      hooks: the user's hooks; None stands for any.
      agreement: `parts.workers.agreement`, if several workers have to agree.

    Raises:
      UsageError: the model or the flags can't work with the data, or workers differ.
    """
    if config.set_by_data:
        checks.apply_data_flags(config, data.flags)
        checks.check_batch(config, strategy.mesh.batch_shard(0, strategy.num_replicas)[1])
    data, lines = loading.enter(config, data)
    train, evaluations = data.train, {name: split for name, split in data.splits.items() if name != "train"}
    evaluation = next(iter(evaluations.values()), None)
    # Predictions and evaluations are of one input: of several, that of the evaluation data, or the first.
    main = evaluation if isinstance(train, Combined) and evaluation is not None else combined.first(train)
    _check_data(config, main, evaluation, data.num_classes)
    example = form.example(main)
    has_labels = form.fields(main.element_spec).labels is not None
    if data.num_classes is None and has_labels:
        classes = config.trainer_class.find_classes(main, **config.arguments("model_arg"))
        data = dataclasses.replace(data, num_classes=classes)
    data_info = preprocessor.check_info(dataclasses.replace(data, train=None, evaluation=None), example)
    trained = None
    if config.has_checkpoint:
        try:
            trained = model_file.read(config.files.path)
        except UsageError:
            if not config.trains:  # else the run writes the file again
                raise
    if trained:
        data_name = f"data_dir={config.data_dir}" if config.data_dir else "the data"
        now = data_info, form.features(example)
        preprocessor.check_trained(data_name, (trained.data_info, trained.features), now)
    splits = {"train": train, **evaluations}
    lock_holds = bool(shared := config.run_dir if config.trains and not config.remote else None)
    if agreement:
        agreement.check_settings(config, splits, strategy, hooks or ())
        agreement.check_examples(splits, strategy, sharding(config).upper())
        if shared:
            lock_holds = agreement.check_run_dir(shared, strategy)

    saved_counts = _saved_counts(config, strategy, combined.first(train))
    train_counts = saved_counts("train").get("saved_data", {})
    # Whether the length of an epoch decides anything; a run that has counted its data continues by that.
    needs_epochs = (
        hooks is None
        or any(hook.needs_epochs for hook in hooks)
        or not config.train_steps
        or any(count >= 0 for count in train_counts.get("counts", ()))
        or (evaluation is not None and config.trains and config.eval_every_steps is None)
        or any(rules.parse_freeze(pattern)[1] is not None for pattern in config.freeze)
    )
    train = _without_epochs(train, config, strategy, needs_epochs)
    updates_before = 0
    # A run that resumes counts from the updates that the model had as it began, not from those it has now.
    if config.trains and config.trainer_class.is_built:
        newest = RunDir(config.run_dir).newest() if config.run_dir else None  # one process alone has such a model
        updates_before = newest.about.get("updates_before", 0) if newest else config.trainer_class.updates_before()
    seed = order_seed(config, updates_before)
    feeds = {"train": combined.feed(train, config.global_batch_size, seed, train_counts, strategy)}
    for name, one in evaluations.items():
        feeds[name] = strategy.eval_feed(one, eval_batch_size(config, one), **saved_counts(name))

    order = feeds["train"].order
    is_endless = not order.has_epochs or (isinstance(train, Stream) and train.is_cut)
    examples = tf.data.INFINITE_CARDINALITY if is_endless else order.num_examples
    contents: dict[str, dict[str, Any]] = {"train": fingerprints.fingerprint(train, examples, data_info.ids)}
    contents["train"]["sample"] = fingerprints.kept_sample(train)
    for name, one in evaluations.items():
        batches = config.eval_batches
        contents[name] = fingerprints.fingerprint(one, feeds[name].order.num_examples, eval_batches=batches)
    if agreement:
        agreement.check_data(contents, strategy)
    faster = loading.faster_input(combined.first(train), config.resident_data_mb, config.shuffle_window)
    lines = [*lines, *([data_info.columns] if data_info.columns else [])]
    return Inputs(data_info, example, splits, feeds, contents, faster, lines, updates_before, lock_holds)


def sharding(config: Config) -> str:
    """Returns how workers divide datasets; by files, the order would depend on how many of them are left."""
    return "data" if config.min_workers and config.auto_shard_policy == "auto" else config.auto_shard_policy


def eval_batch_size(config: Config, split: Split) -> int:
    """Returns the examples of an evaluation's step: as in Keras, a compiled model's data is computed in its batches."""
    return (split.batch_examples if config.has_compiled_model else None) or config.eval_batch_size


def order_seed(config: Config, updates_before: int) -> int | None:
    """Returns the seed of the training data's order; None keeps the examples' own."""
    return seed_after(config.seed, updates_before) if config.shuffle_buffer else None


def saved_inputs(config: Config, strategy: Strategy, agreement: ModuleType | None) -> Inputs:
    """Restores a run's saved description of its data without reading the data. Raises `UsageError`."""
    if agreement:
        agreement.check_settings(config, {}, strategy)
    saved = model_file.read(config.files.path)
    try:
        _ = saved.data_info.tokens and saved.data_info.tokens.ids  # which reads them
    except InputError as error:
        raise UsageError(
            f"{config.run_dir}/{NAMES.model}: {error.message}; restore it from a copy, or train the run on, which "
            "writes it again"
        ) from None
    return Inputs(saved.data_info, (saved.features, None))


def _without_epochs(train: Split, config: Config, strategy: Strategy, needs_epochs: bool) -> Split:
    """Leaves training data uncounted that may be endless; of several inputs, the first has epochs."""
    if not isinstance(train, Combined):
        return train if needs_epochs else _endless(train, config.global_batch_size, config, strategy)
    sizes, counted = train.sizes(config.global_batch_size), combined.first(train) if needs_epochs else None
    return train.mapped(
        lambda name, member: member if member is counted else _endless(member, sizes[name], config, strategy)
    )


def _endless(split: Any, batch_size: int, config: Config, strategy: Strategy) -> Source | Stream:
    """Has a split begin again for ever, and so not counted, unless it is known to end."""
    if split.by_index or split.ends:
        return split
    if split.length == tf.data.UNKNOWN_CARDINALITY and strategy.num_hosts > 1:
        return split
    return Endless(split, (config.train_steps or 1) * batch_size)


def _check_data(config: Config, train, evaluation, num_classes: int | None) -> None:
    """Raises `UsageError` where the model or the flags can't work with the data."""
    name, trainer_class = config.model_entry.name, config.trainer_class
    if trainer_class.needs_labels and config.needs_labels and form.fields(train.element_spec).labels is None:
        raise UsageError(f"{name} needs labels, and the data has none; return (features, labels) for each split")
    if trainer_class.needs_classes:
        components = form.features(train.element_spec)
        is_several = isinstance(components, (dict, tuple)) and not isinstance(components, Spec)
        if name in registry.NAMES["model"] and is_several:  # a user's own model may take them
            makes_array = config.input_entry and "array" in config.input_entry.defaults
            fix = "add input_arg=array=true, which makes one of columns of numbers" if makes_array else "give one array"
            shown = short(", ".join(components) if isinstance(components, dict) else len(components))
            raise UsageError(f"{name} takes one array of features, and the data has several ({shown}); {fix}")
        if num_classes is None:
            need = "labels that are classes" if config.input_entry else "(train, eval, num_classes), with classes"
            raise UsageError(
                f"{name} needs num_classes, and the data has none: {form.labels_shown(train)}; give {need}, numbered "
                "from 0"
            )
    if evaluation is None:
        conflicts.refuse(config, conflicts.WITHOUT_EVALUATION_DATA)
    if config.strategy == "tpu" and (text := form.text_fields(train.element_spec)):
        raise UsageError(
            f"strategy=tpu runs what XLA compiles, and {text[0]} holds strings; make numbers of them in the data "
            "function, or use another strategy"
        )


def _saved_counts(config: Config, strategy: Strategy, train: Split) -> Callable[[str], dict[str, Any]]:
    """Reads the newest checkpoint's counts of a split, as `strategy.feed` takes them, to avoid counting again.

    Has the position in the training data too, if its batches have changed. All workers take the chief's, so that they
    count, or not, together.
    """
    newest = RunDir(config.run_dir).newest() if config.run_dir else None
    counts = newest.about.get("input") if newest else None
    counts = counts if isinstance(counts, dict) else {}
    if newest and config.trains and (position := _position(config, newest, train)):
        counts = {**counts, "train": {**counts.get("train", {}), "resumed": position}}
    agreed_counts = strategy.exchange(counts)[0]
    if position := agreed_counts.get("train", {}).get("resumed"):
        # It was exchanged as plain JSON.
        position["origin"] = Origin(**position["origin"])
        bucket_by = position.pop("bucket_by")
        position["buckets"] = LengthBuckets(*rules.parse_buckets(bucket_by)) if bucket_by else None
    return lambda split: {"saved_data": agreed_counts[split]} if isinstance(agreed_counts.get(split), dict) else {}


def _position(config: Config, newest: Manifest, train: Split) -> dict[str, Any] | None:
    """Describes the position of a run whose batches change or have changed, for `Order.resumed`; plain JSON."""
    if _changed_batches(config, newest, train.by_index) or _other_examples(newest, train):
        newest = config.files.newest(is_whole=True) or newest  # the one that will be restored
    flags, origin = newest.about.get("flags", {}), newest.about.get("origin", {})
    changed, examples = _changed_batches(config, newest, train.by_index), _other_examples(newest, train)
    if not isinstance(flags.get("global_batch_size"), int) or not (changed or origin or examples):
        return None
    bucket_by = flags.get("bucket_by")
    reordered = {name: value for name, value in changed.items() if name != "global_batch_size"}
    numbers = {field.name: int(origin.get(field.name, 0)) for field in dataclasses.fields(Origin)}
    position = {"step": newest.step, "batch_size": flags["global_batch_size"], "origin": numbers, **examples}
    return {**position, "bucket_by": bucket_by, "reordered": reordered}


def _other_examples(newest: Manifest, train: Split) -> dict[str, int]:
    """Finds the `num_examples` of a checkpoint, if there are others now; not of buckets, or of data in sequence."""
    if not isinstance(train, Source) or unknown_dimensions(train.element_spec):
        return {}
    data = newest.about.get("data", {}).get("train")
    before = data.get("examples") if isinstance(data, dict) else None
    return {"num_examples": before} if before and before != len(train) else {}


def _changed_batches(config: Config, newest: Manifest, by_index: bool) -> dict[str, Any]:
    """Finds the flags that decide an epoch's batches and have changed, with their values in a checkpoint."""
    flags = {name: newest.about.get("flags", {}).get(name, getattr(_DEFAULTS, name)) for name in _BATCH_FLAGS}
    changed = {name: value for name, value in flags.items() if value != getattr(config, name)}
    if by_index and flags["shuffle_buffer"] and config.shuffle_buffer:
        changed.pop("shuffle_buffer", None)  # of streams alone
    if not flags["shuffle_buffer"] and not config.shuffle_buffer:
        changed.pop("seed", None)
    return changed
