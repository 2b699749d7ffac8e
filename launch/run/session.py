"""Puts a run together from a configuration: data, strategy, trainer, state, checkpoints and hooks. Host code."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from ...engine import StepOptions, Trainer, optimizers
from ...engine.build import prepare
from ...engine.checkpoints import Checkpoints, Manifest, RunDir, Writer
from ...engine.data import form
from ...engine.data.data import Data
from ...engine.data.lent_feed import LentFeed
from ...engine.data.order import Order, Origin
from ...engine.data.source import Source, Spec, Split, WithoutBadRecords
from ...engine.data.streamed import Endless, Stream
from ...engine.health import watchdog
from ...engine.holdings import Holdings
from ...engine.hooks.base import Period
from ...engine.internals.errors import reason
from ...engine.layers.embeddings import shards_in
from ...engine.mesh.cuts import cut_of
from ...engine.reduction import Reduction
from ...engine.reduction.local_sgd import LocalSgd
from ...engine.reduction.power_sgd import PowerSgd
from ...engine.state import TrainState
from ...engine.step.diagnosis import warn_of_rounded
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE
from ...engine.strategies import FeedOptions, devices, jit_choice
from ...engine.strategies.base import Measured, Strategy
from ...engine.strategies.multi_worker import WorkerTask
from ...engine.strategies.parameter_server.coordinator import Cluster
from ...engine.strategies.parameter_server.placement import Rule
from ...engine.strategies.parameter_server.strategy import ServerOptions
from ...models.classification import Classifier
from ...models.tabular import Tabular
from .. import terminal
from ..command_line import checks, registry, rules
from ..command_line.config import Config, steps_of, whole_periods
from ..command_line.values import plain, short
from ..errors import RunError, UsageError
from ..explanations import with_flags
from ..host import threads
from . import agreement, fingerprints, model_file, names, progress
from . import splits as datasplits
from .names import Names

# A part of fewer examples is not worth its cost: all of TensorFlow's kernels of a step are started for each part.
_LEAST_EXAMPLES_A_PART = 16
_RECORD_SECONDS = 5.0  # for the end of a process that stands still: its disk may do so too


@dataclasses.dataclass
class Session:
    """A run put together: what the modes work on.

    Attributes:
      config: what was asked.
      strategy: where steps run.
      state: what steps change.
      train_steps: updates in all; None where only the run's caller knows.
      example: a batch of one example, zeros, in the form of the data.
      has_evaluation: whether there is evaluation data.
      checkpoints: those of the run; None without a run_dir.
      best: the checkpoint of the best evaluation; None without a run_dir.
      known: what the data says of itself, without its examples.
      faster_input: what to change where steps wait for input, for people.
      bad_records: by split, the sources whose bad records are left out.
      files: paths of those that the training data is read from, as steps go, where a source names them.
      splits: the examples, by "train" and "eval".
      lent_feeds: of what the program hands in, by whether it is trained on.
      lent_streams: the datasets that it handed in last, each with what was made of it.
    """

    config: Config
    strategy: Strategy
    state: TrainState
    train_steps: int | None
    example: Any
    has_evaluation: bool
    checkpoints: Checkpoints | None
    best: Checkpoints | None
    known: Data
    faster_input: str = ""
    bad_records: Mapping[str, WithoutBadRecords] = dataclasses.field(default_factory=dict)
    files: Sequence[str] = ()
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lent_feeds: dict[bool, LentFeed] = dataclasses.field(default_factory=dict)
    lent_streams: list[tuple[Any, Split]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def names(self) -> Names:
        """What the model's numbers stand for."""
        return Names(self.known)

    @property
    def features(self) -> Any:
        """The features of `example`."""
        return form.features(self.example)

    @property
    def trainer(self) -> Trainer:
        return self.state.trainer

    @property
    def evaluates(self) -> bool:
        """Whether the run itself makes evaluations."""
        return self.config.mode == "train_and_eval" and self.has_evaluation

    @property
    def epoch_period(self) -> Period:
        """The period of what is due each epoch: the epoch's steps, rounded up to whole sync periods."""
        order = self.strategy.train_order
        return Period(whole_periods(order.steps_per_epoch, self.config.sync_every_steps), order.shift)

    @property
    def speaks(self) -> bool:
        """Whether what the run does is printed: on the chief alone, and not with --progress=off."""
        return self.strategy.is_chief and self.config.progress != "off"

    def say(self, text: str) -> None:
        """Prints a line, where the run `speaks`."""
        if self.speaks:
            print(terminal.fitted(text, sys.stdout), flush=True)


def make_strategy(config: Config, record_end: Callable[[str], None] | None = None) -> Strategy:
    """Makes the strategy, before anything else touches the devices.

    Args:
      config: of the run.
      record_end: called in a thread where the watchdog ends the process, with the line that says why.
    """

    def end_process(line: str) -> None:
        if record_end:
            recording = threading.Thread(target=record_end, args=(with_flags(line),), daemon=True)
            recording.start()
            recording.join(_RECORD_SECONDS)
        watchdog.end_process(with_flags(line))

    strategy = devices.create(
        "one_device" if config.is_evaluator else config.strategy,
        num_virtual_devices=config.num_virtual_devices,
        mesh=rules.mesh_shape(config.mesh),
        shard_optimizer=config.shard_optimizer,
        tpu_address=config.tpu_address,
        task=_task(config),
        servers=_servers(config),
        communication=config.communication,
        step_timeout_seconds=_step_timeout_seconds(config),
        end_process=end_process,
        steps_per_loop=config.steps_per_loop,
        feed_options=FeedOptions(
            config.resident_data_mb << 20,
            config.shuffle_buffer,
            config.auto_shard_policy,
            config.shuffle_window,
            read_timeout_seconds=_step_timeout_seconds(config) / 2,  # a read that hangs is named, not who waits for it
            watch=progress.watch(config.progress if config.is_chief else "off"),
        ),
        batch_parts=batch_parts(config),
        owns_process=config.owns_process,
        gpus=config.gpu_numbers,
    )
    checks.check_batch(config.global_batch_size, strategy.mesh.part(0, strategy.num_replicas)[1])
    tf.config.list_logical_devices()  # starts them, so that TensorFlow's messages about it come now
    return strategy


def create(config: Config, data: Data, strategy: Strategy, needs_epochs: bool = True) -> Session:
    """Builds strategy-bound data, trainer, state and checkpoints, and restores nothing.

    Args:
      config: of the run.
      data: as it was loaded.
      strategy: made by `make_strategy`.
      needs_epochs: whether anything but the configuration and evaluations is due at the ends of epochs.
    """
    train, evaluation, said = datasplits.of(config, data.train, data.evaluation)
    _check_data(config, train, evaluation, data.num_classes)
    example = datasplits.example(train)
    if data.num_classes is None and issubclass(config.trainer_class, Tabular):
        data = dataclasses.replace(data, num_classes=_classes_by_values(config, train))
    known = names.checked(dataclasses.replace(data, train=None, evaluation=None), example)
    if trained := model_file.of_trained(config):
        now = known, form.features(example)
        names.check_trained(_named_data(config), (trained.known, trained.features), now)
    splits = {"train": train} if evaluation is None else {"train": train, "eval": evaluation}
    agreement.check_asked(config, splits, strategy)
    if config.run_dir and config.trains and not config.remote:
        agreement.check_run_dir(config.run_dir, strategy)
    known_input = _known_input(config, strategy)
    if not (needs_epochs or _needs_epochs(config, evaluation is not None, known_input("train"))):
        train = _without_epochs(train, config, strategy)
    seed = config.seed if config.shuffle_buffer else None
    train_feed = strategy.feed(train, config.global_batch_size, seed, **known_input("train"))
    eval_feed = None
    if evaluation is not None:
        eval_feed = strategy.feed(evaluation, config.eval_batch_size, None, **known_input("eval"))
    examples = tf.data.INFINITE_CARDINALITY if train_feed.is_endless else train_feed.order.num_examples
    contents = {"train": fingerprints.of(train, examples, known.ids)}
    if eval_feed:
        contents["eval"] = fingerprints.of(evaluation, eval_feed.order.num_examples)
    agreement.check_data(contents, strategy)
    order = train_feed.order
    train_steps = _train_steps(config, order)
    options = step_options(config, train_steps, strategy.batch_parts, order)
    state = build_state(config, strategy, options, (example, known.num_classes, known.vocabulary))
    if Holdings(state.trainer).tables:
        checks.check_tables(config, config.model_entry.name)
    if strategy.is_chief and (arrays := train.as_arrays()) is not None:
        warn_of_rounded(state.trainer, form.features(arrays))
    strategy.bind(state, train_feed, eval_feed)
    feeds = {"train": train_feed} if eval_feed is None else {"train": train_feed, "eval": eval_feed}
    inputs = {split: about for split, feed in feeds.items() if (about := feed.about())}
    checkpoints, best = checkpoints_of(config, state, strategy, contents, inputs, order)
    session = Session(
        *(config, strategy, state, train_steps, example, bool(eval_feed), checkpoints, best, known),
        datasplits.faster_input(train, config.resident_data_mb, config.shuffle_window),
        {name: split for name, split in splits.items() if isinstance(split, WithoutBadRecords)},
        train_feed.files(),
        splits,
    )
    for line in [*said, *([known.columns] if known.columns else [])]:
        session.say(line)
    return session


def _named_data(config: Config) -> str:
    return f"--data_dir={config.data_dir}" if config.data_dir else "the data"


def _train_steps(config: Config, order: Order) -> int | None:
    """Returns the step at which a run ends; None where only its caller knows. `order` is of its training data."""
    if order.shift % config.sync_every_steps:
        raise UsageError(
            f"--global_batch_size={order.batch_size}: from step {order.origin.step} on epochs would end between two "
            f"syncs (--sync_every_steps={config.sync_every_steps}); resume with the batch size that the run had"
        )
    if config.is_endless:
        return None
    return config.train_steps or max(1, steps_of(config.train_epochs, order.steps_per_epoch) - order.shift)


def _needs_epochs(config: Config, evaluates: bool, known: Mapping[str, Any]) -> bool:
    """Returns whether the length of an epoch decides anything; a run that has counted its data goes on by that."""
    counted_before = any(count >= 0 for count in known.get("known", {}).get("counts", ()))
    evaluates_by_epoch = evaluates and config.trains and config.eval_every_steps is None
    freezes_by_epoch = any(rules.frozen(each)[1] is not None for each in config.freeze)
    return counted_before or not config.train_steps or evaluates_by_epoch or freezes_by_epoch


def _without_epochs(train: Source | Stream, config: Config, strategy: Strategy) -> Source | Stream:
    """Returns training data that is not counted, where it may not end."""
    if train.by_index or train.ends:
        return train
    if train.length == tf.data.UNKNOWN_CARDINALITY and strategy.num_hosts > 1:
        return train
    return Endless(train, config.train_steps * config.global_batch_size)


def build_state(
    config: Config,
    strategy: Strategy,
    options: StepOptions,
    known_data: tuple[Any, int | None, Any],
) -> TrainState:
    """Makes the trainer, where the strategy has its variables; `known_data`: the example, num_classes, vocabulary."""

    def make() -> TrainState:
        trainer = config.trainer_class(**config.given_arguments("model_arg"))
        state = TrainState(trainer)
        prepare(trainer, options, _reduction(config), *known_data, _num_servers(config, strategy))
        state.build()
        return state

    try:
        state = strategy.build(make)
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:  # of any batch
        given_arguments = plain(config.given_arguments("model_arg"))
        arguments = "".join(f" --model_arg={name}={value}" for name, value in given_arguments.items())
        raise RunError(
            f"{config.model_entry.name}{arguments} does not fit into memory ({reason(error)}); make the model smaller, "
            "or share it out over devices by --mesh"
        ) from error
    has_optimizers = bool(state.trainer.holdings.optimizers)  # else its step shows that nothing is compressed
    if config.powersgd_rank and has_optimizers and not state.trainer.reduction.memory:
        raise UsageError(
            f"--powersgd_rank={config.powersgd_rank}: no gradient of {config.model_entry.name} is smaller as two "
            "matrices of this rank; use a lower one (1, 2 and 4 are common), or leave it out"
        )
    if strategy.mesh.is_cut and not any(map(cut_of, Holdings(state.trainer).all_weights)):
        raise UsageError(
            f"--mesh={config.mesh}: {config.model_entry.name} has no layer that is cut over the model's axis, so "
            "replicas would compute the same; make it of crankshaft.engine.parallel's layers, or leave --mesh out"
        )
    return state


def _check_data(config: Config, train, evaluation, num_classes: int | None) -> None:
    """Raises `UsageError` where the model or the flags can't work with the data."""
    name, is_ours = config.model_entry.name, issubclass(config.trainer_class, (Classifier, Tabular))
    if is_ours and form.fields(train.element_spec).labels is None:
        raise UsageError(f"{name} needs labels, and the data has none; return (features, labels) for each split")
    if issubclass(config.trainer_class, Classifier):
        _check_classes(config, train, num_classes)
    if evaluation is None:
        checks.check_without_evaluation(config)
    if config.strategy == "tpu" and (text := form.text_fields(train.element_spec)):
        raise UsageError(
            f"--strategy=tpu runs what XLA compiles, and {text[0]} holds strings; make numbers of them in the data "
            "function, or use another --strategy"
        )


def _check_classes(config: Config, train, num_classes: int | None) -> None:
    """Raises `UsageError` where a model of ours takes one array and features are several, or labels are not classes."""
    name, parts = config.model_entry.name, form.features(train.element_spec)
    if name in registry.NAMES["model"] and isinstance(parts, (dict, tuple)) and not isinstance(parts, Spec):
        by_array = config.input_entry and "array" in config.input_entry.defaults
        cure = "add --input_arg=array=true, which makes one of columns of numbers" if by_array else "give one array"
        shown = short(", ".join(parts) if isinstance(parts, dict) else len(parts))
        raise UsageError(f"{name} takes one array of features, and the data has several ({shown}); {cure}")
    if num_classes is None:
        what = "labels that are classes" if config.input_entry else "(train, eval, num_classes), with classes"
        raise UsageError(
            f"{name} needs num_classes, and the data has none: {datasplits.labels_shown(train)}; give {what}, "
            "numbered from 0"
        )


def _classes_by_values(config: Config, train) -> int | None:
    """Returns `datasplits.num_classes`; raises `UsageError` where a tabular model can't tell its task from labels."""
    example = form.fields(train.element_spec)
    if train.as_arrays() is None:
        task = config.arguments("model_arg").get("task", "auto")
        is_open = task == "auto" and not {"user", "item"} <= set(example.features)
        if is_open and tf.as_dtype(example.labels.dtype).is_floating:
            raise UsageError(
                f"{config.model_entry.name}: the labels are floats that are read as training goes, so whether they are "
                "clicks (0 and 1) or numbers is not known; use --model_arg=task=clicks or --model_arg=task=ratings"
            )
    return datasplits.num_classes(train)


def batch_parts(config: Config) -> int:
    """Returns how many parts of a batch the CPU's cores compute in parallel: one each, where the model allows it."""
    splits = config.trainer_class.splits_batch(**config.given_arguments("model_arg"))
    if not splits or config.strategy != "one_device" or config.jit == "on" or not config.owns_process:
        return 1
    cores = threads.given()
    examples = config.global_batch_size // config.accumulate_steps
    return cores if 1 <= cores <= examples // _LEAST_EXAMPLES_A_PART else 1


def _num_servers(config: Config, strategy) -> int:
    """Returns how many servers tables are divided for: as many as the run began with, as its checkpoints' shards."""
    newest = RunDir(config.run_dir).newest() if config.run_dir else None
    return (newest and shards_in(newest.variables)) or strategy.num_servers


def choose_jit(session: Session) -> str:
    """Decides `state.jit`, measuring where that is asked for and undecided, and returns a line with the reason."""
    config, state, strategy = session.config, session.state, session.strategy
    if reason := config.why_no_jit or with_flags(strategy.why_no_jit or ""):
        if config.jit == "on":
            raise UsageError(f"--jit=on: {reason}; use --jit=auto or off")
        strategy.without_jit = True
        if state.jit is None:
            state.jit = False  # a choice that was made before is kept for the next process
        return f"XLA off: {reason}"
    if config.jit != "auto":
        state.jit = config.jit == "on"
        return f"XLA {config.jit}, as asked"
    if state.jit is None and getattr(session.trainer, "asks_for_jit", False):
        state.jit = True
        return "XLA on, as the model is compiled"
    if state.jit is not None:
        return f"XLA {'on' if state.jit else 'off'}, as this run began"
    session.say("timing steps with XLA and without: seconds, more where the machine is busy")
    measured, why_not = jit_choice.measure(strategy, state)
    state.jit = jit_choice.choose(measured)
    cast(Measured, strategy).use_loop(measured[state.jit][1])  # the others say why XLA is not for them
    rates = {jit: f"{rate:,.0f}" for jit, (rate, _) in measured.items()}
    with_xla = f"{rates[True]} with it" if True in rates else why_not
    return f"XLA {'on' if state.jit else 'off'}: steps/s {rates[False]} without, {with_xla}"


def _task(config: Config) -> WorkerTask | None:
    if config.strategy != "multi_worker":
        return None
    names, addresses = zip(*config.cluster.addresses, strict=True)
    return WorkerTask(config.cluster.index, names, addresses, config.cluster.secret, config.cluster.bind)


def _servers(config: Config) -> ServerOptions | None:
    if not config.coordinates:
        return None
    cluster = config.cluster
    return ServerOptions(
        Cluster(cluster.job("chief")[0], cluster.job("worker"), cluster.job("ps")),
        max_staleness_steps=config.max_staleness_steps,
        placement_rules=tuple(Rule(*rule) for rule in config.placement_rules),
    )


def _step_timeout_seconds(config: Config) -> float:
    seconds = config.step_timeout_seconds
    return watchdog.default_timeout_seconds() if seconds is None else seconds


def step_options(config: Config, train_steps: int | None, batch_parts: int, order: Order | None = None) -> StepOptions:
    """Makes the settings of a run's step; `order` is of its training data, None where it does not train."""
    optimizer_arg = config.given_arguments("optimizer_arg")
    exclude = optimizer_arg.pop("weight_decay_exclude", WEIGHT_DECAY_EXCLUDE)
    ema_warmup = optimizer_arg.pop("ema_warmup", True)
    clips = {ours: optimizer_arg.pop(name, 0.0) for name, ours in registry.CLIPS.items()}
    # Modes that do not train accept any number of steps, but a schedule needs a step after its warm-up.
    least_steps = config.warmup_steps + 1
    has_length = config.trains and train_steps is not None
    rate_by = order if order and order.origin.rate_steps else None
    if rate_by and train_steps is not None:
        train_steps = max(rate_by.rate_step(train_steps), least_steps)
    return StepOptions(
        seed=config.seed,
        precision=config.precision,
        optimizer=config.optimizer,
        optimizer_arg=optimizer_arg,
        learning_rate=config.learning_rate,
        learning_rate_schedule=config.learning_rate_schedule,
        learning_rate_schedule_arg=config.given_arguments("learning_rate_schedule_arg"),
        warmup_steps=config.warmup_steps,
        rate_by=rate_by,
        total_steps=train_steps if has_length else max(train_steps or 0, least_steps),
        weight_decay=config.weight_decay,
        weight_decay_exclude=exclude,
        freeze=config.frozen_steps(order.steps_per_epoch, order.shift) if order else (),
        clip_norm=config.clip_norm,
        **clips,
        ema_decay=config.ema_decay,
        ema_warmup=ema_warmup,
        reduce_lr=bool(config.reduce_lr),
        accumulate_steps=config.accumulate_steps,
        batch_parts=batch_parts,
        recompute=config.recompute,
        on_nonfinite=config.on_nonfinite,
        debug=config.debug,
        check_numerics=config.check_numerics,
    )


def _reduction(config: Config) -> Reduction:
    if config.sync_every_steps > 1:
        return LocalSgd(config.sync_every_steps, optimizers.outer(**config.arguments("outer_arg")), config.reduce_dtype)
    return (
        PowerSgd(config.powersgd_rank, config.reduce_dtype) if config.powersgd_rank else Reduction(config.reduce_dtype)
    )


def _known_input(config: Config, strategy: Strategy) -> Callable[[str], dict[str, Any]]:
    """Returns what the run's newest checkpoint says of a split, as `strategy.feed` takes it: what need not be counted.

    And of the training data where it stands, if the batch size has changed. All workers take the chief's, so that they
    count, or not, together.
    """
    newest = RunDir(config.run_dir).newest() if config.run_dir else None
    found = newest.about.get("input") if newest else None
    found = found if isinstance(found, dict) else {}
    if newest and config.trains and (position := _position(config, newest)):
        found = {**found, "train": {**found.get("train", {}), "resumed": position}}
    known = json.loads(strategy.exchange_text(json.dumps(found))[0])
    if position := known.get("train", {}).get("resumed"):
        position["origin"] = Origin(**position["origin"])
    return lambda split: {"known": known[split]} if isinstance(known.get(split), dict) else {}


def _position(config: Config, newest: Manifest) -> dict[str, Any] | None:
    """Returns where a run stands whose batch size changes or has changed, the arguments of `Order.resumed`."""
    if newest.about.get("flags", {}).get("global_batch_size") != config.global_batch_size:
        newest = RunDir(config.run_dir).newest(is_whole=True) or newest  # the one that will be restored
    before, origin = newest.about.get("flags", {}).get("global_batch_size"), newest.about.get("origin", {})
    if not isinstance(before, int) or (before == config.global_batch_size and not origin):
        return None
    numbers = {each.name: int(origin.get(each.name, 0)) for each in dataclasses.fields(Origin)}
    return {"step": newest.step, "batch_size": before, "origin": numbers}


def checkpoints_of(
    config: Config,
    state: TrainState,
    strategy: Strategy,
    data: dict[str, dict[str, int]],
    inputs: dict,
    order: Order | None = None,
) -> tuple[Checkpoints | None, Checkpoints | None]:
    """Returns those of the run, and that of its best evaluation; of a run without a folder None.

    `order` is of its training data, None where it has none.
    """
    if not config.run_dir:
        return None, None
    about = {**config.about(), "strategy": strategy.describe(), "data": fingerprints.agreed(data, strategy)}
    about["cpu"], about["updated"] = threads.of(strategy), state.updated()
    if inputs:
        about["input"] = inputs
    if order and order.origin.step:
        about["origin"] = dataclasses.asdict(order.origin)
    life = strategy.exchange_text(uuid.uuid4().hex)[0]
    writer = Writer(strategy.host, life, _step_timeout_seconds(config))
    run = RunDir(config.run_dir)
    checkpoints = Checkpoints(
        run.checkpoints, state.checkpoint, keep=config.keep_checkpoints, about=about, writer=writer
    )
    best = Checkpoints(run.best, state.checkpoint, keep=1, about=about, writes=config.writes_best, writer=writer)
    return checkpoints, best
