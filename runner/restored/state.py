"""Makes what a run's steps change: its trainer with all variables, and the settings of a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from ...engine import optimizers
from ...engine.build import prepare
from ...engine.checkpoints import RunDir
from ...engine.data import form
from ...engine.data.feeds import combined
from ...engine.data.feeds.feed import Feed
from ...engine.data.order import Order
from ...engine.errors import reason
from ...engine.mesh.sharded import variable_sharding
from ...engine.reduction import Reduction
from ...engine.state import TrainState
from ...engine.step.diagnosis import warn_of_rounded
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE, RunContext, StepOptions
from ...engine.strategies.base import Strategy
from ..command_line import checks, registry
from ..command_line.config import Config, steps_from_epochs
from ..command_line.flags import FIELDS
from ..command_line.values import plain
from ..data.inputs import Inputs
from ..failures import RunError, UsageError
from ..host import cpu_threads, isolation
from . import weights

# One of fewer examples is not worth its cost: all of TensorFlow's kernels of a step are started for each.
_LEAST_EXAMPLES_PER_MICRO_BATCH = 16


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


def build_state(config: Config, strategy: Strategy, run_inputs: Inputs, train_steps: int | None) -> TrainState:
    """Makes the trainer and all that its steps change, where the strategy has its variables."""
    options = _step_options(config, train_steps, strategy.parallel_micro_batches, run_inputs.order)
    trainer_class = config.trainer_class
    in_place, exists = trainer_class.trains_in_place(strategy.distribution), trainer_class.is_built
    # What only reads a checkpoint has its shards, so that each id keeps its row.
    trains = config.trains and not config.is_evaluator
    newest = RunDir(config.run_dir).newest() if config.run_dir and not trains else None
    num_servers = (newest and newest.table_shards) or strategy.num_servers
    data = run_inputs.data_info
    context = RunContext(options, data.num_classes, data.vocabulary, num_servers, run_inputs.example, in_place)
    load_initial = weights.initial_loader(config.init_from)

    def share(examples: int) -> int:
        return math.ceil(examples / strategy.num_replicas)

    evaluation = None
    if run_inputs.evaluation is not None:
        most = max((feed.order.batch_size for feed in run_inputs.evaluation_feeds.values()), default=1)
        evaluation = form.example(run_inputs.evaluation), share(most)
    order, shards = run_inputs.order, strategy.mesh.batch_shard(0, strategy.num_replicas)[1]
    weights_by_class = np.array([*(data.class_weight or {}).values()], np.float32)
    context = dataclasses.replace(
        context,
        load_initial=load_initial,
        has_unequal_shares=bool(order and order.has_epochs and order.num_examples % shards),
        rounds_class_weights=bool(np.any(weights_by_class + 1 - 1 != weights_by_class)),
        replica_batch_size=share(config.global_batch_size),
        evaluation=evaluation,
    )

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
        # Keras can train a model further that no strategy has made.
        state = make() if in_place and strategy.trains_in_place else strategy.build(make)
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
            "would compute the same; make it of crankshaft.parts.sharding's layers, or leave mesh out"
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
        **({"optimizer": "sgd", "optimizer_arg": {}} if config.leaves_optimizer_out else {}),
        "parallel_micro_batches": parallel_micro_batches,
    }
    return StepOptions(**{**flags, **clips, **changed})
