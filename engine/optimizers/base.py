"""The base of all optimizers (learning rate, count of updates, weight decay), and that of fused kernels.

An update communicates only if the optimizer is sharded, or its `Place` is elsewhere. Built on the host in a strategy's
scope, applied in replica code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from .. import logging
from ..errors import UsageError
from ..internals.graphs import ENGINE_SCOPE
from ..internals.variables import (
    assign_local,
    is_shard,
    read_local,
    state_key,
    tf_variable,
    variable_path,
)
from ..mesh import sharded
from ..mesh.sharded import Sharding, variable_sharding
from ..reduction.per_replica import components
from ..step.context import step_context
from ..step.gradients import Gradients, sum_duplicate_rows
from .averaging import Shadows, WeightAverage

Rate = float | Callable[[tf.Tensor], tf.Tensor]  # a number, or a schedule
_PLAIN = (bool, int, float, str, type(None))
_LARGE = 10**6  # values of a variable, whose update may take longer than the rest of a step
_MOVES_ALL_ROWS = (
    "%s moves all rows of %s %s in each update, also those that no example of the batch has, as its paper and Keras "
    "do; if that takes long, use a crankshaft.Embedding, of which only rows in use move, or adagrad"
)
_BEGUN_BY_ROWS = (
    "%s moves only the rows of %s that a batch uses, as this run began; a new run moves all, as its paper and Keras do"
)
Pairs = Sequence[tuple[Any, "Target"]]  # of a gradient and the variable to update
Scalars = Mapping[str, tf.Tensor]
Group = tuple[contextlib.AbstractContextManager, Pairs, Scalars]  # updated within a context, with gradients there


class Place:
    """Where an optimizer makes its updates: the replica itself, which has the variables. A subclass is elsewhere.

    Attributes:
      use_locking: whether fused kernels' updates of one variable wait for each other.
      applies: what an update there applies of a run's options besides the rule's, see `step.options.Applied`.
    """

    use_locking = False
    applies: tuple[str, ...] = ()

    def progress(self, optimizer: Optimizer) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (iterations, learning_rate_scale, update_counts) before an optimizer's next update."""
        iterations, scale = map(tf.convert_to_tensor, (optimizer.iterations, optimizer.learning_rate_scale))
        return iterations, scale, optimizer.read_counts()

    def piece(self, variable: tf.Variable) -> Any:
        """Returns which piece of a variable a replica updates (`sharding.shards.UpdateShard`); None if all of it."""
        return None

    @contextlib.contextmanager
    def opened(self, pairs: Pairs) -> Iterator[Pairs]:
        """Yields the pairs that this replica updates; after the context, all replicas have the updated variables."""
        yield pairs

    def groups(self, pairs: Pairs, scalars: Scalars) -> Iterator[Group]:
        """Yields the pairs by where they are updated, with the scalars there."""
        yield contextlib.nullcontext(), pairs, scalars

    def update_rows(self, target: Target, update: Callable[..., None], **terms: tf.Tensor) -> None:
        """Calls `update(**terms)`, which changes rows of a target's variable, if they may still be changed."""
        update(**terms)


class Optimizer(tf.Module):
    """Updates a list of variables from gradients that are already summed across replicas.

    A subclass makes its slots (`_build_slots`) and updates (`_update`). Each replica updates its own copy of everything
    by raw ops on `variable.handle`, so `apply` may be called within `tf.cond` and `tf.while_loop`, and replicas with
    the same gradients stay identical to the bit. If the mesh shards the optimizer (`parts.sharding.shards`), a replica
    has the slots of its shards, updates these, and all gather the weights; then it can't be called in a loop.

    Args:
      learning_rate: a number, or a Keras LearningRateSchedule or other callable from the int64
        count of updates to a scalar.
      weight_decay: decoupled decay (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101) as in Keras: before the
        update, variable -= learning_rate * weight_decay * variable, for all rows, also with a sparse gradient. Of the
        engine's tables (`parts.tables`) only the gradient's rows decay, once per update, so that an update
        of a table costs no more than the rows it uses.
      weight_decay_exclude: regular expression; variables whose path it matches do not decay, e.g. "bias|gamma|beta".
      name: a valid identifier; the class's name by default.
      from_options: whether it is made only from a run's options (`engine.optimizers.rules`).

    Variables, made by `build` and saved in checkpoints: iterations, int64 scalar, updates applied so far;
    learning_rate_scale, float32 scalar, the factor of every rate, 1.0 until a hook lowers it; update_counts, int64
    [variables], the updates of each variable, by which the bias of its slots is corrected, as in PyTorch.
    """

    # Whether only the product of gradient and rate matters: a factor of all gradients may then be applied to the rate.
    takes_factors_as_rate = False
    # Whether a value's update depends only on that value, its slots and its gradient: then it can be sharded.
    is_elementwise = False
    # Whether it moves all rows of a layer's variable by a sparse gradient, as by a dense one; `TrainState` sets False
    # for a run that began by the gradient's rows alone. Keras's rules always do.
    moves_all_rows = True
    # The moving average of the updated variables, an `engine.optimizers.averaging.WeightAverage`, if any.
    weight_average: WeightAverage | None = None
    # Where updates are made.
    place = Place()

    def __init__(
        self,
        learning_rate: Rate,
        *,
        weight_decay: float | None = 0.0,
        weight_decay_exclude: str | None = None,
        name: str | None = None,
        from_options: bool = False,
    ):
        super().__init__(name=name or type(self).__name__.lower())
        if weight_decay is not None and weight_decay < 0:
            raise UsageError(f"weight_decay={weight_decay} is negative; use 0 for none")
        self._learning_rate = learning_rate
        self.from_options = from_options
        self.weight_decay = weight_decay
        self.weight_decay_exclude = weight_decay_exclude
        # Made by `build`.
        self.iterations: tf.Variable = None
        self.learning_rate_scale: tf.Variable = None
        self.update_counts: tf.Variable = None
        # The number of updates before the scale was changed last, and the scale of the last of these updates.
        self._scale_before: tuple[tf.Tensor, tf.Tensor] | None = None
        self._targets: Any = None  # `_Targets`
        self.built_settings: Mapping[str, Any] = types.MappingProxyType({})

    def __setattr__(self, name: str, value: Any) -> None:
        # An unknown setting would have no effect, and a variable is what the steps update.
        is_setting = hasattr(self, name) and not isinstance(getattr(self, name), tf.Variable)
        if name[0] != "_" and getattr(self, "_targets", None) is not None and not is_setting:
            names = ", ".join(["learning_rate", *sorted(self.settings.keys() - {"from_options"})])
            raise AttributeError(f"{self.name} has no setting {name}; it has {names}")
        super().__setattr__(name, value)

    def build(self, variables: Sequence, multipliers: Sequence[float] | None = None) -> None:
        """Makes `iterations`, `learning_rate_scale`, `update_counts` and the slots. Once, eager, in strategy scope.

        Args:
          variables: Keras variables or tf.Variables; their order names the slots in a checkpoint.
          multipliers: the factor of each variable's learning rate and decoupled decay, as in PyTorch's parameter
            groups; a variable with 0 is never updated and has no slots. None is 1 for all.
        """
        if self._targets is not None:
            raise RuntimeError(f"optimizer {self.name} is already built; make a new one")
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        # On one server, from which a step reads all three as one tensor (`parameter_servers.pulled`).
        with tf.distribute.get_strategy().extended.colocate_vars_with(self.iterations):
            self.learning_rate_scale = tf.Variable(1.0, dtype=tf.float32, trainable=False, name="learning_rate_scale")
            counts = tf.zeros([len(variables)], tf.int64)
            self.update_counts = tf.Variable(counts, trainable=False, name="update_counts")
        targets = _Targets(self.name, variables, multipliers or [1.0] * len(variables), self.place)
        if not self.is_elementwise and (parts := [target for target in targets if target.slot_sharding]):
            cause = "shard_optimizer" if parts[0].piece else "a mesh's model axis"
            raise UsageError(
                f"{cause} has each replica update a shard of {parts[0].path} alone, and the rule of {self.name} may "
                "need all of it; set is_elementwise = True in a class of which that is not so, or leave that out"
            )
        if wide := [target.path for target in targets if target.variable.dtype == tf.float64]:
            raise UsageError(
                f"variable {wide[0]} is float64, and losses, gradients and updates are float32; make the model in "
                "float32, and center or scale data that needs more digits"
            )
        self._build_slots(targets)
        for target in targets:
            target.decays = self._decays(target)
        if self.weight_decay and (tables := [t.path for t in targets if t.decays and is_shard(t.variable)]):
            logging.warning(
                "weight_decay=%g: an update decays only the rows of %s that its batch uses; all other weights decay in "
                "each update",
                self.weight_decay,
                ", ".join(tables),
            )
        self._targets = targets
        self.built_settings = types.MappingProxyType(self.settings)  # a dictionary would be tracked by checkpoints

    def move_to(self, place: Place) -> None:
        """Sets where later steps make their updates; `build` has been called. Raises UsageError if they can't there."""
        self.place = place

    @property
    def settings(self) -> dict[str, Any]:
        """The plain hyperparameters, such as `momentum`, by name; a step is traced again if one changes."""
        return plain_settings(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the name, the present rate and the settings, like Keras's optimizers."""
        return {"name": self.name, "learning_rate": float(self.learning_rate), **self.settings}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings that have changed since `build`, which a checkpoint keeps."""
        return {name: value for name, value in self.settings.items() if value != self.built_settings[name]}

    def restore_settings(self, values: Mapping[str, Any]) -> None:
        """Sets some of `settings`."""
        for name in values.keys() & self.built_settings.keys():
            setattr(self, name, values[name])

    @property
    def updated_variables(self) -> list[tf.Variable]:
        """The `trainable` variables as tf.Variables."""
        return [target.variable for target in self._targets]

    @property
    def trainable(self) -> list:
        """The variables passed to `build` that are not frozen, in order, Keras's or TensorFlow's as passed."""
        return [target.original for target in self._targets]

    @property
    def all_variables(self) -> list[tf.Variable]:
        """All variables passed to `build`, as tf.Variables, in order."""
        return [target.variable for target in self._targets.all]

    @property
    def paths(self) -> dict[int, str]:
        """The paths of `updated_variables`, by `id`."""
        return {id(target.variable): target.path for target in self._targets or ()}

    def last_learning_rate(self) -> tf.Tensor:
        """Returns the rate of the last update, or of the first one before it is made: a float32 scalar tensor."""
        iterations, scale = tf.convert_to_tensor(self.iterations), tf.convert_to_tensor(self.learning_rate_scale)
        if self._scale_before is not None:
            updates, before = self._scale_before
            scale = tf.where(tf.equal(updates, iterations), before, scale)
        return self._rate_at(iterations, scale, updates_ago=1)

    def scale_learning_rate(self, scale: float) -> None:
        """Sets the factor of the schedule's or constant rate for later updates."""
        # As tensors, so that nothing waits; if it changed since the last update, that update's scale stays known.
        updates, before = tf.identity(self.iterations), tf.identity(self.learning_rate_scale)
        if self._scale_before is not None:
            then, first = self._scale_before
            before = tf.where(tf.equal(then, updates), first, before)
        self._scale_before = updates, before
        self.learning_rate_scale.assign(scale)

    def final_average(self) -> Shadows | None:
        """Returns averages that replace the weights when training ends, as by `use_ema` in Keras's `fit`, if any."""
        return None

    @property
    def learning_rate(self) -> tf.Tensor:
        """The rate of the next update: schedule(iterations) * scale, a float32 scalar tensor."""
        return self._rate_at(tf.convert_to_tensor(self.iterations), tf.convert_to_tensor(self.learning_rate_scale))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.set_learning_rate(float(value))

    def set_learning_rate(self, value: float) -> None:
        """Sets the rate of later updates.

        Raises:
          UsageError: the rate is a schedule.
        """
        constant = self._learning_rate
        if callable(constant) or not constant:
            raise UsageError(
                f"the learning rate of {self.name} is a schedule, or 0, so it can't be set to {value:g}; use "
                "learning_rate_schedule=constant with a rate above 0"
            )
        self.scale_learning_rate(value / constant)

    def _rate_at(self, iterations: tf.Tensor, scale: tf.Tensor, updates_ago: int = 0) -> tf.Tensor:
        """Returns the rate after `iterations - updates_ago` updates, float32 scalar."""
        rate = self._learning_rate
        if callable(rate):
            rate = rate(tf.maximum(iterations - updates_ago, 0) if updates_ago else iterations)
        return tf.cast(rate, tf.float32) * scale

    def read_counts(self) -> tf.Tensor:
        """Reads the updates of each variable before the next one, int64 [variables]. Replica code."""
        return read_local(self.update_counts)

    def apply_gradients(self, grads_and_vars: Any) -> NoReturn:
        """Raises an error with the alternative: Keras's method sums across replicas by itself."""
        raise UsageError(
            f"optimizer {self.name} has no apply_gradients, which would ignore the run's options; return "
            "crankshaft.minimize(self, batch, losses, {'loss': self.optimizer}) from train_step"
        )

    def apply(self, gradients: Sequence, variables: Sequence) -> None:
        """Updates `variables`, and their average, and counts one iteration. Replica code.

        Args:
          gradients: for each variable a tensor of its shape, or of its shard's if its update is sharded,
            tf.IndexedSlices of its rows, or None (that variable is left alone and counts no update, like frozen ones),
            summed across replicas already; a list or `Gradients`.
          variables: among those passed to `build`, in any order.
        """
        if self._targets is None:
            raise RuntimeError(f"optimizer {self.name} is not built; call build(variables) in the strategy's scope")
        applied, frozen = step_context().applied, step_context().frozen
        applied.optimizers.add(id(self))
        averages = ("ema_decay", "ema_warmup") if self.weight_average is not None else ()
        applied.mark("Optimizer.apply", *averages, *self.place.applies)
        gradients = gradients if isinstance(gradients, Gradients) else Gradients(gradients)
        factor: Any = 1.0
        if self.takes_factors_as_rate:
            gradients, factor = gradients.without_factors()
        pairs = [
            (gradient, target)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
            if (target := self._targets[variable]).multiplier and id(target.variable) not in frozen
        ]
        iterations, scale, counts = self.place.progress(self)
        learning_rate = self._rate_at(iterations, scale)
        with self.place.opened(pairs) as opened:
            if self.weight_decay:
                opened = self._decay(opened, learning_rate * self.weight_decay)
            with tf.name_scope(ENGINE_SCOPE):
                self._update(opened, learning_rate * factor, counts)
        for _, target in pairs:
            if constraint := getattr(target.original, "constraint", None):  # of a Keras variable
                # In the engine's scope, or the checks would take it for an assignment of the step's own.
                with tf.name_scope(ENGINE_SCOPE):
                    assign_local(target.variable, constraint(target.read()))
        # Every replica counts by itself: assign_add on a mirrored variable would synchronize.
        tf.raw_ops.AssignAddVariableOp(resource=self.iterations.handle, value=tf.ones([], tf.int64))
        positions = {target.position for _, target in pairs}
        now = tf.constant([int(n in positions) for n in range(self.update_counts.shape[0])], tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self.update_counts.handle, value=now)
        if self.weight_average is not None:
            # A run that continues another's optimizer counts iterations from 0.
            most = tf.reduce_max(tf.convert_to_tensor(self.update_counts))
            self.weight_average.update(variables, tf.maximum(tf.convert_to_tensor(self.iterations), most))

    def reset_rows(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """Gives the slots of rows of a variable their initial values, on all replicas of this process.

        `update_counts` counts updates of the whole variable, so a row that begins again is updated like one that a
        sparse gradient touches late for the first time.

        Args:
          variable: among those passed to `build`.
          rows: int64 [n], of its first axis.
        """
        for slot, initialize in self._row_slots(self._targets[variable]):
            for copy in components(slot):
                with tf.device(copy.device):
                    values = initialize([rows.shape[0], *copy.shape[1:]])
                    tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=rows, updates=values)

    def _row_slots(self, target: Target) -> Iterable[tuple[tf.Variable, Callable[[list], tf.Tensor]]]:
        """Returns the slots of a target, each with a function of a shape that makes its initial values.

        Raises:
          UsageError: a slot does not belong to rows.
        """
        raise UsageError(f"optimizer {self.name} can't reset rows of {target.path}; use adagrad, adam or sgd")

    def _build_slots(self, targets: _Targets) -> None:
        """Makes the slots of each target. Called in the strategy's scope."""
        raise NotImplementedError

    def _update(self, pairs: Pairs, learning_rate: tf.Tensor, counts: tf.Tensor) -> None:
        """Applies the rule to (gradient, target) pairs, each at its multiple of the rate. Replica code.

        Args:
          pairs: (gradient, target).
          learning_rate: for a multiplier of 1, float32 scalar.
          counts: int64, each variable's updates before this one, by position.
        """
        raise NotImplementedError

    def _decays(self, target: Target) -> bool:
        exclude = self.weight_decay_exclude
        return not (exclude and re.search(exclude, target.path))

    def _decay(self, pairs: Pairs, factor: tf.Tensor) -> list[tuple[Any, Target]]:
        """Applies weight decay: variable -= factor * variable; for a table's shard, only the gradient's rows.

        Returns the pairs; a shard's gradients are without duplicates, so that they are searched once.
        """
        decayed = []
        for gradient, target in pairs:
            if target.decays and isinstance(gradient, tf.IndexedSlices) and is_shard(target.variable):
                gradient = sum_duplicate_rows(gradient)
                decay = functools.partial(_decay_rows, target)
                self.place.update_rows(target, decay, factor=target.multiplied(factor), indices=gradient.indices)
            elif target.decays:
                value = target.read()
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=target.variable.handle, alpha=tf.cast(target.multiplied(factor), value.dtype), delta=value
                )
            decayed.append((gradient, target))
        return decayed


class FusedOptimizer(Optimizer):
    """A rule with one fused kernel per variable: its slots, a step's scalars, and two updates.

    `dense` updates all of a variable; `sparse`, with `indices`, the rows that a sparse gradient (tf.IndexedSlices)
    has, after repeated rows are summed: of the engine's tables (`parts.tables`), so that an update costs no more than
    the rows it uses, and if `moves_all_rows` is False of any variable. Both get the kernels' arguments, by their names
    (https://www.tensorflow.org/api_docs/python/tf/raw_ops): `var` and the slots are resource handles. Slots and
    variables are float32. XLA can't compile the sparse kernels of momentum, adagrad and ftrl.

    A class that defines `dense` says there what holds of it, or else none of it does, whatever its base says:
    `is_elementwise = True` if a value's update needs that value, its slots and its gradient alone, so that a replica
    may update a shard; `takes_factors_as_rate = True` if a factor of all gradients may be applied to the rate instead;
    `moves_all_rows = False` if a value whose gradient is 0 stays as it is. Without `sparse` it updates no table. All
    plain arguments of its constructor that it keeps under their names are its `settings`: checkpoints have them, and a
    run resumes with the same.

    Args:
      learning_rate: a number, or a function of the int64 count of updates, such as a Keras schedule.
      weight_decay: decoupled decay, see `Optimizer`.
      weight_decay_exclude: regular expression; variables whose path it matches do not decay.
      name: the class's name by default.
      from_options: the engine's own.

    Example:
      >>> class SignSGD(FusedOptimizer):
      ...     is_elementwise = True
      ...
      ...     def dense(self, var, lr, grad, use_locking):
      ...         tf.raw_ops.AssignSubVariableOp(resource=var, value=lr * tf.sign(grad))
    """

    slots: Any = None  # {a target's key: {a slot's name: its variable}}, made by `build`
    dense: Callable[..., None]
    sparse: Callable[..., None]

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if "dense" in vars(cls):
            for name in ("is_elementwise", "takes_factors_as_rate", "moves_all_rows"):
                setattr(cls, name, vars(cls).get(name, getattr(Optimizer, name)))

    def initial_slots(self) -> dict[str, float]:
        """Returns {slot: its initial value}."""
        return {}

    def scalars(self, learning_rate: tf.Tensor, step: tf.Tensor) -> dict[str, Any]:
        """Computes the scalars of an update, at once for all variables.

        Args:
          learning_rate: float32 tensor, scalar or [variables].
          step: float64 tensor [variables], 1.0 for a variable's first update.

        Returns:
          {argument: number or tensor, scalar or [variables]}; the kernels get float32 scalars.
        """
        return {"lr": learning_rate}

    def _row_slots(self, target: Target) -> list[tuple[tf.Variable, Callable[[list], tf.Tensor]]]:
        slots, values = self.slots.get(target.key, {}), self.initial_slots()  # none of a frozen variable
        return [(slot, functools.partial(tf.fill, value=np.float32(values[name]))) for name, slot in slots.items()]

    def _build_slots(self, targets: _Targets) -> None:
        strategy = tf.distribute.get_strategy()
        slots = {}
        for target in targets:
            variable = target.variable
            if variable.dtype != tf.float32:
                raise UsageError(
                    f"variable {target.path} is {variable.dtype.name}, and {self.name} updates "
                    "float32; keep variables in float32 and compute in 16 bits (mixed precision)"
                )
            if is_shard(variable) and not hasattr(self, "sparse"):
                raise UsageError(
                    f"{self.name} has no sparse, by which rows of table {target.path} are updated; write it"
                )
            shape = target.piece.sharding.local_shape if target.piece else variable.shape
            with strategy.extended.colocate_vars_with(variable):
                slots[target.key] = {
                    slot: tf.Variable(
                        lambda: tf.fill(shape, np.float32(value)),  # noqa: B023
                        trainable=False,
                        name=f"{self.name}/{target.key}/{slot}",
                    )
                    for slot, value in self.initial_slots().items()
                }
            for slot, variable in slots[target.key].items():
                sharded.mark(variable, target.slot_sharding, self.initial_slots()[slot])
        self.slots = slots

    def _update(self, pairs: Pairs, learning_rate: tf.Tensor, counts: tf.Tensor) -> None:
        multipliers = self._targets.multipliers
        if {*multipliers} != {1.0}:
            learning_rate = learning_rate * tf.constant(multipliers, tf.float32)  # [variables]
        exact = self.scalars(learning_rate, tf.cast(counts + 1, tf.float64))
        scalars = {name: tf.cast(value, tf.float32) for name, value in exact.items()}
        for context, group, here in self.place.groups(pairs, scalars):
            with context:
                by_variable = {name: tf.unstack(value) for name, value in here.items() if value.shape.rank}
                for gradient, target in group:
                    arguments = {**here, **{name: column[target.position] for name, column in by_variable.items()}}
                    arguments |= {name: slot.handle for name, slot in self.slots[target.key].items()}
                    arguments |= {"var": target.variable.handle, "use_locking": self.place.use_locking}
                    if isinstance(gradient, tf.IndexedSlices) and self._moves_rows_alone(target):
                        gradient, update = sum_duplicate_rows(gradient), functools.partial(self.sparse, **arguments)
                        values = tf.cast(gradient.values, tf.float32)
                        self.place.update_rows(target, update, grad=values, indices=gradient.indices)
                        continue
                    if isinstance(gradient, tf.IndexedSlices):
                        rows = target.variable.shape[0]
                        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
                    self.dense(grad=tf.cast(gradient, tf.float32), **arguments)

    def _moves_rows_alone(self, target: Target) -> bool:
        """Returns whether a sparse gradient moves its own rows alone; warns of what may surprise."""
        if is_shard(target.variable) or not type(self).moves_all_rows:
            return hasattr(self, "sparse")
        if not self.moves_all_rows:
            logging.warning_once(_BEGUN_BY_ROWS, self.name, target.path)
        elif target.variable.shape.num_elements() > _LARGE:
            logging.warning_once(_MOVES_ALL_ROWS, self.name, target.path, target.variable.shape)
        return not self.moves_all_rows


def _decay_rows(target: Target, factor: tf.Tensor, indices: tf.Tensor) -> None:
    handle = target.variable.handle
    rows = tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=target.variable.dtype)
    tf.raw_ops.ResourceScatterSub(resource=handle, indices=indices, updates=rows * tf.cast(factor, rows.dtype))


def plain_settings(optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's attributes that are plain values and named like its constructor's arguments."""
    values = vars(optimizer)
    return {name: values[name] for name in _arguments(optimizer.__class__) if isinstance(values.get(name, ()), _PLAIN)}


@functools.cache
def _arguments(kind: Any) -> list[str]:
    return sorted({name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters})


class Target:
    """A variable to update: its name in checkpoints and its value on this replica. Made in the strategy's scope."""

    def __init__(self, variable: Any, position: int, multiplier: float, place: Place):
        self.original = variable
        self.position = position
        self.multiplier = multiplier
        self.variable = tf_variable(variable)
        self.path = variable_path(variable)
        self.key = state_key(variable, position)
        self.decays = True
        self.piece = place.piece(self.variable)

    @property
    def slot_sharding(self) -> Sharding | None:
        """How its slots are sharded over the mesh; None if each replica has them whole."""
        return self.piece.sharding if self.piece else variable_sharding(self.variable)

    def multiplied(self, factor: tf.Tensor) -> tf.Tensor:
        """Multiplies a learning rate or decay of all variables by this one's multiplier."""
        return factor if self.multiplier == 1 else factor * self.multiplier

    def read(self) -> tf.Tensor:
        """Reads this replica's value, a tensor."""
        return read_local(self.variable)


class _Targets:
    """Targets in order, found by variable.

    A separate class: in a list or dictionary on a tf.Module the model's variables would be in the checkpoint twice.
    """

    def __init__(self, owner: str, variables: Sequence, multipliers: Sequence[float], place: Place):
        self._owner = owner
        pairs = zip(variables, multipliers, strict=True)
        targets = [Target(variable, n, multiplier, place) for n, (variable, multiplier) in enumerate(pairs)]
        self._by_id = {id(target.variable): target for target in targets}
        self.all = [*self._by_id.values()]  # with those that are frozen
        self.multipliers = [target.multiplier or 1.0 for target in self.all]

    def __iter__(self) -> Iterator[Target]:
        """Yields the targets that are updated: all but the frozen ones."""
        return (target for target in self.all if target.multiplier)

    def __getitem__(self, variable: Any) -> Target:
        try:
            return self._by_id[id(tf_variable(variable))]
        except KeyError:
            raise UsageError(
                f"optimizer {self._owner} was built without variable {variable_path(variable)}; pass every variable to "
                "build. If a layer makes it in a later call, make it in the layer's build, or call the layer in "
                "build_model"
            ) from None
