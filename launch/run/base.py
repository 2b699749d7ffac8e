"""Assembles a run from its configuration: strategy, data, trainer, state, checkpoints. Host code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from ...engine import StepOptions, Trainer, optimizers
from ...engine.build import prepare
from ...engine.checkpoints import Checkpoints, RunDir, WritingProcess
from ...engine.checkpoints.in_memory import Snapshots
from ...engine.data import combined, form
from ...engine.data.data import Data
from ...engine.data.feed import Feed
from ...engine.data.order import Order
from ...engine.data.source import Source, Split, WithoutBadRecords
from ...engine.data.streamed import Stream
from ...engine.errors import counted, reason
from ...engine.health import watchdog
from ...engine.hooks import Hook, StopRequest
from ...engine.hooks.base import Period
from ...engine.hooks.evaluation import FinalWeights
from ...engine.hooks.recorder import Recorder
from ...engine.hooks.rollback import Rollback
from ...engine.hooks.sync_check import SyncCheck
from ...engine.inventory import Inventory
from ...engine.keras_models.keras_trainer import KerasTrainer
from ...engine.layers.embeddings import shards_in
from ...engine.loop import Loop
from ...engine.machine.threads import Thread
from ...engine.mesh.shards import variable_sharding
from ...engine.reduction import Reduction
from ...engine.reduction.local_sgd import LocalSgd
from ...engine.reduction.power_sgd import PowerSgd
from ...engine.state import TrainState
from ...engine.step.diagnosis import warn_of_rounded
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE, RunContext
from ...engine.strategies import FeedOptions, devices, jit_choice
from ...engine.strategies.base import Strategy
from ...engine.strategies.multi_worker import WorkerTask
from ...engine.strategies.parameter_server.coordinator import ClusterAddresses
from ...engine.strategies.parameter_server.placement import Rule
from ...engine.strategies.parameter_server.strategy import ServerOptions
from .. import terminal
from ..command_line import checks, registry, rules
from ..command_line.config import WITHOUT_DATA, Config, steps_of, whole_periods
from ..command_line.values import plain
from ..errors import RunError, UsageError, setting
from ..explanations import with_flags
from ..host import threads
from ..host.signals import Signals
from . import kept, progress, room
from .data import inputs
from .data.inputs import Inputs
from .history import History, TrainMetrics
from .saved import fingerprints, model_file
from .saved.preprocessor import Names

# One of fewer examples is not worth its cost: all of TensorFlow's kernels of a step are started for each.
_LEAST_EXAMPLES_PER_MICRO_BATCH = 16
_RECORD_SECONDS = 5.0  # for the end of a process that stands still: its disk may do so too
T = TypeVar("T", bound="BaseRun")


@dataclasses.dataclass(repr=False, eq=False)
class BaseRun:
    """An assembled run, which is the argument of the modes' functions.

    `Run` adds the calls of a program. Of runs that train, `training.prepare` sets the attributes from `loop` on.

    Attributes:
      config: its checked configuration.
      strategy: where steps run.
      inputs: its data.
      state: changed by steps.
      train_steps: the total number of updates; None if only the run's caller knows.
      checkpoints: those of the run; None without a run_dir.
      best: the checkpoint of the best evaluation; None without a run_dir.
      external_streams: the datasets that calls brought last, each with its split.
      hooks: of a run that trains, in the order in which they act.
      record: the one of them that writes the run's events; None of workers but the chief.
      sync_check: the check that compares replicas, if there are several.
      snapshots: those in memory; None if it takes none.
      rollback: the hook that takes the run back after an error in its numbers, if it does.
      resumed_from: the step of the checkpoint that it was resumed from; None without one.
      is_from_memory: whether that checkpoint is a snapshot that the attempt before has left in memory.
      is_ready: whether its steps were checked and their compiler was chosen.
      loop: the outer loop.
      signals: the context in which a signal ends training at a step; the caller then decides what to do with the run.
      stop_request, rows, metrics, final: hooks: by which signals end the run, its history, its newest means, and
        whether the weights have changed since they were evaluated.
    """

    config: Config
    strategy: Strategy
    inputs: Inputs
    state: TrainState
    train_steps: int | None
    checkpoints: Checkpoints | None
    best: Checkpoints | None
    external_streams: list[tuple[Any, Split]] = dataclasses.field(default_factory=list)
    hooks: list[Hook] = dataclasses.field(default_factory=list)
    record: Recorder | None = None
    sync_check: SyncCheck | None = None
    snapshots: Snapshots | None = None
    rollback: Rollback | None = None
    resumed_from: int | None = None
    is_from_memory: bool = False
    is_ready: bool = False
    loop: Loop = dataclasses.field(init=False)
    signals: Signals = dataclasses.field(init=False)
    stop_request: StopRequest = dataclasses.field(init=False)
    rows: History = dataclasses.field(init=False)
    metrics: TrainMetrics = dataclasses.field(init=False)
    final: FinalWeights = dataclasses.field(init=False)

    @classmethod
    def create(
        cls: type[T],
        config: Config,
        data: Data | Callable[[], Data],
        strategy: Strategy,
        needs_epochs: bool = True,
        limits: Iterable[Callable[[Feed], int | None]] = (),
        check_folder: Callable[[], None] = lambda: None,
    ) -> T:
        """Puts a run together, and restores nothing.

        Args:
          config: of the run.
          data: as it was loaded, or what loads it, which a mode without data does not call.
          strategy: made by `make_strategy`.
          needs_epochs: see `inputs.build`.
          limits: return the last step that a hook allows, see `Hook.last_step`.
          check_folder: raises where the run_dir is not this run's any more.
        """
        if config.mode in WITHOUT_DATA:
            run_inputs, steps = inputs.saved_inputs(config, strategy), config.train_steps or 1
        else:
            run_inputs = inputs.build(config, data() if callable(data) else data, strategy, needs_epochs)
            steps = train_steps(config, run_inputs.feeds["train"], limits)
        earlier = kept.take(config, run_inputs, steps)
        before = run_inputs.updates_before
        state = (
            earlier.restarted(before)
            if earlier
            else build_state(config, strategy, run_inputs, steps, build=functools.partial(room.build, config))
        )
        strategy.bind(state, run_inputs.feeds.get("train"), run_inputs.feeds.get("eval"))
        if earlier:
            earlier.give_compiled(strategy)
        saved = build_checkpoints(config, state, strategy, run_inputs, check_folder)
        run = cls(config, strategy, run_inputs, state, steps, *saved)
        for line in run_inputs.lines:
            run.log(line)
        return run

    @functools.cached_property
    def names(self) -> Names:
        """Names of the model's numbers: `classes`, by label number, and `ids(features)`, which looks up text."""
        return Names(self.known)

    @property
    def known(self) -> Data:
        """The data's own description."""
        return self.inputs.known

    @property
    def logits_of(self) -> str | None:
        """The kind of logits that the trainer's `forward` outputs; see `model_file.logits_of`."""
        return model_file.logits_of(self.trainer)

    @property
    def splits(self) -> Mapping[str, Source | Stream]:
        """The run's examples, by "train" and "eval"."""
        return self.inputs.splits

    @property
    def example(self) -> Any:
        """A batch of one example, zeros, in the form of the data."""
        return self.inputs.example

    @property
    def no_jit_reason(self) -> str:
        """Why training can't be one XLA program, whatever --jit is; "" if it can."""
        return self.config.no_jit_reason or self.strategy.no_jit_reason or ""

    @property
    def features(self) -> Any:
        """The features of `example`."""
        return form.features(self.example)

    @property
    def trainer(self) -> Trainer:
        """The trainer, on which the run works."""
        return self.state.trainer

    @property
    def step(self) -> int:
        """Updates done."""
        return self.state.step

    @property
    def stop(self) -> str | None:
        """Why the run has stopped training: its end, or a hook's reason; None while it trains."""
        if not self.config.trains:
            return None
        status = self.loop.status
        return status.stop or (f"step {status.step} is the last of the run" if status.last else None)

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data."""
        return "eval" in self.inputs.feeds

    @property
    def evaluates(self) -> bool:
        """Whether the run itself makes evaluations."""
        return self.config.mode == "train_and_eval" and self.has_evaluation

    @property
    def epoch_period(self) -> Period:
        """The steps between actions due each epoch: the epoch's steps, rounded up to whole sync periods."""
        order = self.strategy.training.feed.order
        return Period(whole_periods(order.steps_per_epoch, self.config.sync_every_steps), order.shift)

    @property
    def prints(self) -> bool:
        """Whether the run prints its progress: on the chief alone, and not with --progress=off."""
        return self.strategy.is_chief and self.config.progress != "off"

    def log(self, text: str) -> None:
        """Prints a line, where the run `prints`."""
        if self.prints:
            print(terminal.fitted(text, sys.stdout), flush=True)

    def spending(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time within as spent on something, one of `goodput.KINDS`."""
        return self.record.spending(kind) if self.record else contextlib.nullcontext()

    def bad_records(self) -> dict[str, int]:
        """Returns how many records were left out of each split that may have bad ones, by any of the workers."""
        left_out = {name: split for name, split in self.splits.items() if isinstance(split, WithoutBadRecords)}
        return {name: len(self.strategy.bad_records(split)) for name, split in left_out.items()}


def make_strategy(config: Config, record_end: Callable[[str], None] | None = None) -> Strategy:
    """Makes the strategy, before anything else touches the devices.

    Args:
      config: of the run.
      record_end: called in a thread if the watchdog ends the process, with the reason in a line.
    """

    def end_process(line: str) -> None:
        if record_end:
            recording = Thread(target=record_end, args=(with_flags(line),), daemon=True)
            with contextlib.suppress(RuntimeError):  # without memory for it the process ends all the same
                recording.start()
                recording.join(_RECORD_SECONDS)
        watchdog.end_process(with_flags(line))

    strategy = devices.create(
        "one_device" if config.is_evaluator else config.strategy,
        num_virtual_devices=config.num_virtual_devices,
        distribution=_distribution_of_model(config),
        mesh=rules.mesh_shape(config.mesh),
        shard_optimizer=config.shard_optimizer,
        tpu_address=os.environ.get("TPU_NAME", ""),
        task=_task(config),
        servers=_servers(config),
        communication=config.communication,
        step_timeout_seconds=_step_timeout_seconds(config),
        end_process=end_process,
        steps_per_loop=config.steps_per_loop,
        feed_options=FeedOptions(
            config.resident_data_mb << 20,
            config.shuffle_buffer,
            inputs.sharding(config),
            config.shuffle_window,
            read_timeout_seconds=_step_timeout_seconds(config) / 2,  # a read that hangs is named, not who waits for it
            watch=progress.watch(config.progress if config.is_chief else "off"),
        ),
        parallel_micro_batches=parallel_micro_batches(config),
        owns_process=config.owns_process,
        gpus=config.gpu_numbers,
        # TensorFlow has no deterministic form of the op that checks numbers on GPUs.
        deterministic=not config.check_numerics
        and os.environ.get("TF_DETERMINISTIC_OPS", "").lower() not in ("0", "false"),
    )
    checks.check_batch(config, strategy.mesh.batch_share(0, strategy.num_replicas)[1])
    tf.config.list_logical_devices()  # starts them, so that TensorFlow's messages about it come now
    return strategy


def _distribution_of_model(config: Config) -> tf.distribute.Strategy | None:
    """Returns the strategy in whose scope a Keras model was made that is to be trained."""
    return config.trainer_class.strategy() if issubclass(config.trainer_class, KerasTrainer) else None


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
        ClusterAddresses(cluster.job("chief")[0], cluster.job("worker"), cluster.job("ps")),
        max_staleness_steps=config.max_staleness_steps,
        placement_rules=tuple(Rule(*rule) for rule in config.placement_rules),
    )


def _step_timeout_seconds(config: Config) -> float:
    seconds = config.step_timeout_seconds
    return watchdog.default_timeout_seconds() if seconds is None else seconds


def parallel_micro_batches(config: Config) -> int:
    """Returns how many micro-batches the CPU's cores compute in parallel: one each, where the model allows it."""
    splits = config.trainer_class.splits_batch(**config.configured_arguments("model_arg"))
    if not splits or config.strategy != "one_device" or config.jit == "on" or not config.owns_process:
        return 1
    cores = threads.configured()
    examples = config.global_batch_size // config.accumulate_steps
    return cores if 1 <= cores <= examples // _LEAST_EXAMPLES_PER_MICRO_BATCH else 1


def train_steps(config: Config, feed: Feed, limits: Iterable[Callable[[Feed], int | None]]) -> int | None:
    """Returns the step at which a run ends; None where only its caller knows. `feed` is of its training data."""
    order = feed.order
    if order.shift % config.sync_every_steps:
        raise UsageError(
            f"{setting('global_batch_size', order.batch_size)}: from step {order.origin.step} on epochs would end "
            f"between two syncs ({setting('sync_every_steps', config.sync_every_steps)}); resume with the run's "
            "earlier batch size"
        )
    if config.is_endless:
        return None
    steps = config.train_steps or max(1, steps_of(config.train_epochs, order.steps_per_epoch) - order.shift)
    return min([steps, *(last for limit in limits if (last := limit(feed)) is not None)])


def build_state(
    config: Config,
    strategy: Strategy,
    run_inputs: Inputs,
    train_steps: int | None,
    build: Callable[[Strategy, Callable[[], TrainState]], TrainState] = lambda strategy, make: strategy.build(make),
) -> TrainState:
    """Makes the trainer and all that its steps change, where the strategy has its variables.

    `build` calls `make` there; a model that exists, and parameter servers, are built without it.
    """
    options = _step_options(config, train_steps, strategy.parallel_micro_batches, run_inputs.order)
    trainer_class = config.trainer_class
    in_place = issubclass(trainer_class, KerasTrainer) and trainer_class.trains_in_place(strategy.distribution)

    known, num_servers = run_inputs.known, _num_servers(config, strategy)
    context = RunContext(options, known.num_classes, known.vocabulary, num_servers, run_inputs.example, in_place)

    def make() -> TrainState:
        trainer, own = trainer_class(**config.configured_arguments("model_arg")), context
        if isinstance(trainer, KerasTrainer) and trainer.is_built:
            before = tf.Variable(run_inputs.updates_before, dtype=tf.int64, trainable=False)
            own = dataclasses.replace(context, updates_before=before)
        state = TrainState(prepare(trainer, own, _reduction(config)))
        state.build()
        return state

    try:
        if in_place and strategy.trains_in_place:  # Keras can train a model further that no strategy has made
            state = make()
        else:
            exists = issubclass(trainer_class, KerasTrainer) and trainer_class.is_built
            state = strategy.build(make) if exists or config.coordinates else build(strategy, make)
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:  # of any batch
        model_arguments = plain(config.configured_arguments("model_arg"))
        arguments = "".join(f" --model_arg={name}={value}" for name, value in model_arguments.items())
        raise RunError(
            f"{config.model_entry.name}{arguments} does not fit into memory ({reason(error)}); make the model smaller, "
            f"or shard it across devices by {setting('mesh')}"
        ) from error
    inventory = Inventory(state.trainer)  # without optimizers, its step shows that nothing is compressed
    if config.powersgd_rank and inventory.optimizers and not state.trainer.reduction.memory:
        raise UsageError(
            f"{setting('powersgd_rank', config.powersgd_rank)}: no gradient of {config.model_entry.name} is smaller as "
            "two matrices of this rank; use a lower one (1, 2 and 4 are common), or leave it out"
        )
    if strategy.mesh.is_sharded and not any(map(variable_sharding, inventory.all_weights)):
        raise UsageError(
            f"{setting('mesh', config.mesh)}: {config.model_entry.name} has no layer sharded over the model's "
            "axis, so replicas would compute the same; make it of crankshaft.engine.layers.parallel's layers, or leave "
            f"{setting('mesh')} out"
        )
    if inventory.tables:
        checks.check_tables(config, config.model_entry.name)
    if (
        strategy.is_chief
        and "train" in run_inputs.splits
        and (arrays := combined.first(run_inputs.splits["train"]).as_arrays()) is not None
    ):
        warn_of_rounded(state.trainer, form.features(arrays))
    return state


def _num_servers(config: Config, strategy) -> int:
    """Returns how many servers tables are divided for: as many as the run began with, as its checkpoints' shards."""
    newest = RunDir(config.run_dir).newest() if config.run_dir else None
    return (newest and shards_in(newest.variables)) or strategy.num_servers


def _step_options(
    config: Config, train_steps: int | None, parallel_micro_batches: int, order: Order | None
) -> StepOptions:
    """Makes the settings of a run's step; `order` is of its training data, None where it does not train."""
    optimizer_arg = config.configured_arguments("optimizer_arg")
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
        learning_rate_schedule_arg=config.configured_arguments("learning_rate_schedule_arg"),
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
        parallel_micro_batches=parallel_micro_batches,
        recompute=config.recompute,
        on_nonfinite="raise" if config.rollbacks else config.on_nonfinite,  # the step is the same
        debug=config.debug,
        check_numerics=config.check_numerics,
    )


def _reduction(config: Config) -> Reduction:
    if config.sync_every_steps > 1:
        return LocalSgd(config.sync_every_steps, optimizers.outer(**config.arguments("outer_arg")), config.reduce_dtype)
    return (
        PowerSgd(config.powersgd_rank, config.reduce_dtype) if config.powersgd_rank else Reduction(config.reduce_dtype)
    )


def build_checkpoints(
    config: Config, state: TrainState, strategy: Strategy, run_inputs: Inputs, check_folder: Callable[[], None]
) -> tuple[Checkpoints | None, Checkpoints | None]:
    """Returns those of the run, and that of its best evaluation; of a run without a folder None.

    `check_folder` raises where the folder is not this run's any more.
    """
    if not config.run_dir:
        return None, None
    about = {
        **config.as_json(),
        "strategy": strategy.describe(),
        "data": fingerprints.agreed(run_inputs.contents, strategy),
    }
    about["cpu"], about["updated"] = threads.counts(strategy), state.updated()
    if of_feeds := {split: feed.share.metadata() for split, feed in run_inputs.feeds.items() if feed.share}:
        about["input"] = of_feeds
    if run_inputs.updates_before:
        about["updates_before"] = run_inputs.updates_before
    if run_inputs.order and run_inputs.order.origin.step:
        about["origin"] = dataclasses.asdict(run_inputs.order.origin)
    attempt = strategy.exchange_text(uuid.uuid4().hex)[0]
    writer = WritingProcess(strategy.host, attempt, _step_timeout_seconds(config))
    run = RunDir(config.run_dir)
    options: dict[str, Any] = {"about": about, "writer": writer, "check": check_folder}
    checkpoints = Checkpoints(run.checkpoints, state.checkpoint, keep=config.keep_checkpoints, **options)
    best = Checkpoints(run.best, state.checkpoint, keep=1, writes=config.writes_best, **options)
    return checkpoints, best


def choose_jit(run: BaseRun) -> str:
    """Decides `state.jit`, measuring if --jit=auto leaves it open, and returns a line with the reason."""
    config, state, strategy = run.config, run.state, run.strategy
    if reason := run.no_jit_reason:
        if config.jit == "on":
            raise UsageError(f"{setting('jit')}=on: {reason}; use {setting('jit')}=auto or off")
        if state.jit is None:
            state.jit = False  # a choice that was made before is kept for the next process
        return f"XLA off: {with_flags(reason)}"
    why = "as this run began"
    if config.jit != "auto":
        state.jit, why = config.jit == "on", "as configured"
    elif state.jit is None and getattr(run.trainer, "wants_jit", False):
        state.jit, why = True, "as the model is compiled"
    left = None if run.train_steps is None else run.train_steps - run.step
    if state.jit is None and jit_choice.is_short(left):
        return f"XLA off: not timed, since the run has {counted(left, 'step')} left"
    if state.jit is not None:
        if strategy.training.jit != state.jit:
            strategy.training = strategy.program("train", strategy.training.feed, state.jit)
        return f"XLA {'on' if state.jit else 'off'}, {why}"
    run.log("timing steps, also with XLA if it may be faster: seconds, more where the machine is busy")
    measured, why_not = jit_choice.measure(strategy, state, steps=left)
    state.jit = jit_choice.choose(measured)
    strategy.training = measured[state.jit][1]
    rates = {jit: f"{rate:,.0f}" for jit, (rate, _) in measured.items()}
    with_xla = f"{rates[True]} with it" if True in rates else why_not
    return f"XLA {'on' if state.jit else 'off'}: steps/s {rates[False]} without, {with_xla}"
