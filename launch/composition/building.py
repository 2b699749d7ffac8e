"""Builds a run from its configuration: strategy, data, trainer, state, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ...engine import devices, optimizers
from ...engine.build import prepare
from ...engine.checkpoints import Checkpoints, RunDir, WritingProcess
from ...engine.data import form
from ...engine.data.feeds import combined
from ...engine.data.feeds.feed import Feed
from ...engine.data.order import Order
from ...engine.data.run_data import Data
from ...engine.errors import reason
from ...engine.machine import threads
from ...engine.mesh.sharded import variable_sharding
from ...engine.reduction import Reduction
from ...engine.state import TrainState
from ...engine.step.diagnosis import warn_of_rounded
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE, RunContext, StepOptions
from ...engine.strategies import ClusterAddresses, FeedOptions, ServerOptions, WorkerTask
from ...engine.strategies.base import Strategy
from ...engine.strategies.options import default_timeout_seconds
from ..command_line import checks, registry, rules
from ..command_line.config import WITHOUT_DATA, Config, steps_from_epochs
from ..command_line.flags import FIELDS
from ..command_line.values import plain
from ..failures import RunError, UsageError
from ..host import cpu_threads, isolation
from ..run import free_bytes, progress
from ..run.data import inputs
from ..run.data.inputs import Inputs
from ..run.saved import weights
from .open_run import Run

# One of fewer examples is not worth its cost: all of TensorFlow's kernels of a step are started for each.
_LEAST_EXAMPLES_PER_MICRO_BATCH = 16
_RECORD_SECONDS = 5.0  # limit of recording the end of a hanging process, whose disk may hang too


def build_run(
    config: Config,
    data: Data | Callable[[], Data],
    strategy: Strategy,
    needs_epochs: bool = True,
    limits: Iterable[Callable[[Feed], int | None]] = (),
    check_folder: Callable[[], None] = lambda: None,
) -> Run:
    """Puts a run together, and restores nothing.

    Args:
      data: loaded data, or a function that loads it, which a mode without data does not call.
      needs_epochs: see `inputs.build`.
      limits: functions that return the last step that a hook allows, see `Hook.last_step`.
      check_folder: raises where the run_dir is not this run's any more.
    """
    steps: int | None = config.train_steps or 1
    if config.mode in WITHOUT_DATA:
        run_inputs = inputs.saved_inputs(config, strategy)  # an export works where the data is not
    else:
        run_inputs = inputs.build(config, data() if callable(data) else data, strategy, needs_epochs)
        steps = train_steps(config, run_inputs.feeds["train"], limits)
        run_inputs.feeds["train"].last_step = steps
    cache = None
    if config.trainer_class.is_built:
        from ..keras_models.compiled_cache import CompiledCache

        cache = CompiledCache.pop(config, run_inputs, steps)
    if cache:
        state = cache.restarted(run_inputs.updates_before)
    else:
        state = build_state(config, strategy, run_inputs, steps, build=functools.partial(free_bytes.build, config))
    strategy.bind(state, run_inputs.feeds.get("train"), run_inputs.feeds.get("eval"))
    if cache:  # not before: `bind` makes the programs
        cache.give_compiled(strategy, run_inputs)
    saved = build_checkpoints(config, state, strategy, run_inputs, check_folder)
    run = Run(config, strategy, run_inputs, state, steps, *saved)
    for line in run_inputs.lines:
        run.log(line)
    return run


def make_strategy(config: Config, record_end: Callable[[str], None] | None = None) -> Strategy:
    """Makes the strategy, before anything else touches the devices.

    Args:
      record_end: called in a thread if the watchdog ends the process, with the reason in a line.
    """

    def end_process(line: str) -> None:
        if record_end:
            recording = threading.Thread(target=record_end, args=(line,), daemon=True)
            with contextlib.suppress(RuntimeError):  # without memory for it the process ends all the same
                recording.start()
                recording.join(_RECORD_SECONDS)
        threads.end_process(line)

    task = servers = None
    if config.strategy == "multi_worker":
        cluster = config.tasks
        names, addresses = zip(*cluster.addresses, strict=True)
        task = WorkerTask(cluster.index, names, addresses, cluster.secret, cluster.bind)
    if config.coordinates:
        cluster = config.tasks
        servers = ServerOptions(
            ClusterAddresses(cluster.job("chief")[0], cluster.job("worker"), cluster.job("ps")),
            max_staleness_steps=config.max_staleness_steps,
            placement_rules=tuple(config.placement_rules),
        )
    strategy = devices.create(
        "one_device" if config.is_evaluator else config.strategy,
        num_virtual_devices=config.num_virtual_devices,
        # A Keras model that is to be trained was made in the scope of a strategy, which is used.
        distribution=config.trainer_class.strategy() if config.trainer_class.is_built else None,
        mesh=rules.mesh_shape(config.mesh),
        shard_optimizer=config.shard_optimizer,
        tpu_address=os.environ.get("TPU_NAME", ""),
        task=task,
        servers=servers,
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
            watch=progress.watch(config.progress_mode),
        ),
        parallel_micro_batches=parallel_micro_batches(config),
        owns_process=config.owns_process,
        gpus=config.gpu_numbers,
        run_eagerly=config.run_eagerly,
        # TensorFlow has no deterministic kernel of the op that checks numbers on GPUs.
        deterministic=not config.check_numerics
        and os.environ.get("TF_DETERMINISTIC_OPS", "").lower() not in ("0", "false"),
    )
    checks.check_batch(config, strategy.mesh.batch_shard(0, strategy.num_replicas)[1])
    tf.config.list_logical_devices()  # starts them, so that TensorFlow's messages about it come now
    return strategy


def _step_timeout_seconds(config: Config) -> float:
    seconds = config.step_timeout_seconds
    return default_timeout_seconds() if seconds is None else seconds


def parallel_micro_batches(config: Config) -> int:
    """Returns how many micro-batches the CPU's cores compute in parallel: one each, where the model allows it."""
    splits = config.trainer_class.splits_batch(**config.configured_arguments("model_arg"))
    if not splits or config.strategy != "one_device" or config.jit == "on" or not config.owns_process:
        return 1
    cores = cpu_threads.configured()
    examples = config.global_batch_size // config.accumulate_steps
    return cores if 1 <= cores <= examples // _LEAST_EXAMPLES_PER_MICRO_BATCH else 1


def train_steps(config: Config, feed: Feed, limits: Iterable[Callable[[Feed], int | None]]) -> int | None:
    """Returns the step at which a run ends; None where only its caller knows. `feed` is of its training data."""
    order = feed.order
    if order.shift % config.sync_every_steps:
        raise UsageError(
            f"global_batch_size={order.batch_size}: from step {order.origin.step} on epochs would end between two "
            f"syncs (sync_every_steps={config.sync_every_steps}); resume with the run's earlier batch size and data"
        )
    if config.is_endless:
        return None
    steps = config.train_steps
    if steps is None:
        assert config.train_epochs is not None  # `configure` sets one of them
        steps = max(1, steps_from_epochs(config.train_epochs, order.steps_per_epoch) - order.shift)
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
    in_place, exists = trainer_class.trains_in_place(strategy.distribution), trainer_class.is_built
    # What only reads a checkpoint has its shards, so that each id keeps its row.
    trains = config.trains and not config.is_evaluator
    newest = RunDir(config.run_dir).newest() if config.run_dir and not trains else None
    num_servers = (newest and newest.table_shards) or strategy.num_servers
    data = run_inputs.data_info
    context = RunContext(options, data.num_classes, data.vocabulary, num_servers, run_inputs.example, in_place)
    eval_example = form.example(run_inputs.splits["eval"]) if "eval" in run_inputs.splits else None
    load_initial = weights.initial_loader(config.init_from)
    context = dataclasses.replace(context, load_initial=load_initial, eval_example=eval_example)

    def make() -> TrainState:
        trainer, trainer_context = trainer_class(**config.configured_arguments("model_arg")), context
        if exists:
            before = tf.Variable(run_inputs.updates_before, dtype=tf.int64, trainable=False)
            trainer_context = dataclasses.replace(context, updates_before=before)
        if config.sync_every_steps > 1:
            from ...engine.reduction.local_sgd import LocalSgd

            outer = optimizers.outer(**config.arguments("outer_arg"))
            reduction: Reduction = LocalSgd(config.sync_every_steps, outer, config.reduce_dtype)
        else:
            reduction = Reduction(config.reduce_dtype)
        state = TrainState(prepare(trainer, trainer_context, reduction))
        state.build()
        return state

    try:
        if exists and not in_place:
            trainer_class.build_passed(run_inputs.example)
            isolation.keep_random_state()
        if in_place and strategy.trains_in_place:  # Keras can train a model further that no strategy has made
            state = make()
        else:
            state = strategy.build(make) if exists or config.coordinates else build(strategy, make)
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:  # for any batch size
        model_arguments = plain(config.configured_arguments("model_arg"))
        arguments = "".join(f" model_arg={name}={value}" for name, value in model_arguments.items())
        raise RunError(
            f"{config.model_entry.name}{arguments} does not fit into memory ({reason(error)}); make the model smaller, "
            "or shard it across devices by mesh"
        ) from error
    if exists and in_place:
        isolation.keep_random_state()
        tf.keras.utils.set_random_seed(state.trainer.run_context.host_seed)
    inventory = state.trainer.inventory
    if strategy.mesh.is_sharded and not any(map(variable_sharding, inventory.all_weights)):
        raise UsageError(
            f"mesh={config.mesh}: {config.model_entry.name} has no layer sharded over the model's axis, so replicas "
            "would compute the same; make it of crankshaft.engine.sharding's layers, or leave mesh out"
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
    flags = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(StepOptions) if field.name in FIELDS
    }
    changed = {
        "optimizer_arg": optimizer_arg,
        "learning_rate_schedule_arg": config.configured_arguments("learning_rate_schedule_arg"),
        "rate_by": rate_by,
        "total_steps": train_steps if has_length else max(train_steps or 0, least_steps),
        "weight_decay_exclude": exclude,
        "freeze": config.frozen_steps(order.steps_per_epoch, order.shift) if order else (),
        "ema_warmup": ema_warmup,
        "reduce_lr": bool(config.reduce_lr),
        "parallel_micro_batches": parallel_micro_batches,
    }
    return StepOptions(**{**flags, **clips, **changed})


def build_checkpoints(
    config: Config, state: TrainState, strategy: Strategy, run_inputs: Inputs, check_folder: Callable[[], None]
) -> tuple[Checkpoints | None, Checkpoints | None]:
    """Returns those of the run, and that of its best evaluation; of a run without a folder None."""
    if not config.run_dir:
        return None, None
    about = {
        **config.as_json(),
        "strategy": strategy.describe(),
        "data": strategy.exchange(run_inputs.contents)[0],  # all decide alike, though CPUs may round otherwise
    }
    about["cpu"], about["updated"] = cpu_threads.counts(strategy), state.updated()
    if parts := {split: feed.part.metadata() for split, feed in run_inputs.feeds.items() if feed.part}:
        about["input"] = parts
    if compile_values := state.trainer.compile_values:
        about["compile"] = compile_values
    if run_inputs.updates_before:
        about["updates_before"] = run_inputs.updates_before
    if run_inputs.order and run_inputs.order.origin.step:
        about["origin"] = dataclasses.asdict(run_inputs.order.origin)
    attempt = strategy.exchange(uuid.uuid4().hex)[0]
    writer = WritingProcess(strategy.host, attempt, _step_timeout_seconds(config))
    folder = config.files
    options: dict[str, Any] = {"about": about, "writer": writer, "check": check_folder}
    checkpoints = Checkpoints(folder.checkpoints, state.checkpoint, keep=config.keep_checkpoints, **options)
    # If the run has an evaluator, that alone writes the best checkpoint.
    writes_best = config.is_evaluator or not config.has_evaluator
    best = Checkpoints(folder.best, state.checkpoint, keep=1, writes=writes_best, **options)
    return checkpoints, best
