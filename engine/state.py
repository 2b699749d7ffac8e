"""A run's state: everything that a checkpoint has, and nothing else."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from . import logging
from .checkpoints import Manifest, Matching, graph
from .checkpoints.manifest import check_extra
from .data.position import Position
from .errors import UsageError
from .internals import graphs
from .internals.tensorflow import TrackableNode, variables_read
from .internals.variables import is_shard, state_key, table_identity, tf_variable, variable_path
from .inventory import Freezing, Inventory
from .optimizers import KerasOptimizer, Optimizer
from .reduction import aggregation, per_replica
from .step.context import Readings
from .trainer import Trainer

# The version of the rules that decide a run's bits: the order of examples, random samples, updates. A change that
# alters bits takes the next number, so that no run continues unnoticed with other bits than it began with. A run whose
# bits the last change left as they were keeps the number before (`TrainState.rules`).
RULES = 10  # 10: seed generators of one seed sample alike


class HookState(TrackableNode):
    """State of hooks in a checkpoint besides plain JSON: scalar string variables, by name."""

    optional_in_checkpoint = ("",)  # a run may continue with other hooks

    def variable(self, name: str) -> tf.Variable:
        """Returns the variable of a name; creates it, empty, if needed. Call it before the state is restored."""
        if not hasattr(self, name):
            with tf.device("CPU:0"):
                setattr(self, name, tf.Variable("", trainable=False))
        return getattr(self, name)


class TrainState:
    """A run's state: variables (in `checkpoint`) and plain values (in `host_state`).

    Attributes:
      trainer: the `Trainer`: models, optimizers with their slots, loss scale, averages.
      input: the position in streamed training data.
      of_hooks: hooks' state that is not plain JSON.
      step: number of updates, as the host counts them; a checkpoint keeps `step_variable`, scalar int64.
      jit: whether the training loop is one XLA program; None before that is decided. XLA rounds differently from
        TensorFlow's executor, so a resumed run keeps the choice; a process that can't follow it leaves it unchanged
        (`Strategy.no_jit_reason`).
      is_whole: whether all variables are those of `step`, so that they may be saved. They are not while a compiled call
        changes them, nor after one that was interrupted, until a checkpoint is restored.
      extra: the program's own values, plain JSON by name.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.step = 0
        self.jit: bool | None = None
        self.is_whole = True
        self.extra: dict[str, Any] = {}
        self._named: set[int] = set()  # handles of variables that were logged

    def build(self, step_variable: tf.Variable | None = None) -> None:
        """Makes the step counter. Call it in the strategy's scope.

        Args:
          step_variable: the counter of an earlier state of the trainer, in which compiled steps count; None makes one.
        """
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if step_variable is None:
            step_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="step", aggregation=aggregation)
        step_variable.assign(0)
        self.step_variable = step_variable
        state = weakref.proxy(self)  # the trainer may outlive the state and its data
        self.freezing.step = lambda: state.step
        self.input = Position()
        self.of_hooks = HookState()
        others = {"step": self.step_variable, "input": self.input, "of_hooks": self.of_hooks}
        self.checkpoint = tf.train.Checkpoint(trainer=self.trainer, **others)

    def advance(self, steps: int) -> None:
        """Counts steps that no inner loop counted. Does not wait for the device."""
        self.step += steps
        self.step_variable.assign(self.step)

    @contextlib.contextmanager
    def moving_to(self, step: int) -> Iterator[None]:
        """Marks the state as not whole while a compiled call in this context brings the variables to a step."""
        was_whole, self.is_whole = self.is_whole, False
        yield
        self.step, self.is_whole = step, was_whole

    def variables(self) -> list[tf.Variable]:
        """Returns every variable of the checkpoint once."""
        variables = {}
        for _, trackable in graph.walk(self.checkpoint):
            variable = getattr(trackable, "value", None) if not isinstance(trackable, tf.Variable) else trackable
            if isinstance(variable, tf.Variable):
                variables[id(variable)] = variable
        return list(variables.values())

    def check_saved(self, graph: tf.Graph) -> None:
        """Checks that a checkpoint would have every variable that a step trains, and all that the program writes.

        Raises:
          UsageError: it reads a trainable variable that is not among the trainer's, or writes something that is not.
        """
        held = {id(copy.handle) for variable in self.variables() for copy in per_replica.components(variable)}
        others = {id(v.handle): v for v in variables_read(graph) if id(v.handle) not in held}
        trained = [variable for variable in others.values() if variable.trainable]
        if trained:
            first = min(trained, key=variable_path)
            raise UsageError(
                f"{type(self.trainer).__name__}: its step uses a trainable variable, {variable_path(first)} "
                f"{first.shape.as_list()}, that is in none of its attributes, so no checkpoint would have it; make it, "
                f"or its model or layer, {self.trainer.saved_places}, or set trainable=False"
            )
        self.check_written(graph)
        if type(self.trainer).train_step is Trainer.train_step and (idle := self._never_updated(variables_read(graph))):
            logging.warning(
                "%s: its step uses %s, trainable, that no optimizer updates; to train it, add it to what "
                "trainable_variables(self) returns, a property of the trainer; else set trainable=False",
                type(self.trainer).__name__,
                ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if idle[3:] else ""),
            )

    def check_written(self, graph: tf.Graph) -> None:
        """Raises UsageError if the program's part of a step, traced in a graph, writes what no checkpoint has."""
        states = [generator.state.value for generator, _ in self.trainer.inventory.seed_generators]  # set by each step
        held = {id(copy.handle) for v in (*self.variables(), *states) for copy in per_replica.components(v)}
        others = {
            id(variable.handle): variable for variable in variables_read(graph) if id(variable.handle) not in held
        }
        for handle, op in graphs.written(graph):
            variable = others.pop(id(handle), None)
            if id(handle) not in held and (line := graphs.program_line(op)):
                self._refuse_written(op, variable, line)
        self.trainer.inventory.captured.note_read(others.values())

    def _refuse_written(self, op: tf.Operation, variable: tf.Variable | None, line: str) -> None:
        """Raises UsageError for an op of a step that writes what no checkpoint has: a variable, if it is known."""
        owner = type(self.trainer).__name__
        if op.type.startswith(("LookupTable", "Iterator", "Queue", "Stack")):
            raise UsageError(
                f"{owner}: its step changes a table, an iterator or a queue ({op.type}, at {line}), and checkpoints "
                "have only variables; keep what it needs in a tf.Variable, an attribute of the trainer"
            )
        named = "a variable" if variable is None else f"{variable_path(variable)} {variable.shape.as_list()}"
        raise UsageError(
            f"{owner}: its step assigns {named}, at {line}, that is in none of its attributes, so no checkpoint would "
            "have it; assign it, or its layer, metric or generator, to an attribute of the trainer (also in a list, a "
            "dictionary or a tf.Module); a class of your own that makes variables has to be a tf.Module"
        )

    def _never_updated(self, read: Collection[tf.Variable]) -> list[str]:
        """Returns the paths of trainable variables that a step reads and no optimizer updates; each only once."""

        def handles(variables: Iterable) -> set[int]:
            return {id(copy.handle) for v in variables for copy in per_replica.components(tf_variable(v))}

        inventory = self.trainer.inventory
        updated = handles(v for optimizer in inventory.optimizers.values() for v in optimizer.all_variables)
        in_layers = handles(v for layer in inventory.layers.values() for v in layer.variables)
        weights = handles(v for v in inventory.all_weights if self.trainer.learning_rate_multiplier(v) != 0)
        done = self._named | updated | (in_layers - weights)
        idle = [v for v in read if v.trainable and id(v.handle) not in done]
        self._named |= handles(idle)
        return sorted({*map(variable_path, idle)})

    def check_assigned(
        self, graph: tf.Graph, batch, averaged: Collection[int], replicas: int, doubts: aggregation.Doubts
    ) -> None:
        """Checks that the variables that a step assigns are equal on all replicas afterwards: see `aggregation.check`.

        `averaged` has the `id`s of variables that the step itself averages.
        """
        inventory = self.trainer.inventory
        undeclared = [variable for variable in inventory.undeclared if id(variable) not in averaged]
        differs = self.trainer.reduction.sync_every_steps  # replicas' weights, within a period
        trained = [] if differs else [tf_variable(v) for v in (*inventory.all_weights, *inventory.trainable_variables)]
        kinds = inventory.aggregated, undeclared, trained, inventory.per_replica_variables
        aggregation.check(graph, batch, replicas, *kinds, doubts)

    def check_added(self, graph: tf.Graph, shared: Readings | None = None) -> None:
        """Checks that a step with parameter servers only adds to shared variables, or replaces them.

        Args:
          shared: the step's readings, if several workers share the weights that it trains.

        Raises:
          UsageError: it assigns a variable a value computed from its own, or a trained weight a value for a time.
        """
        assigned = graphs.Assignments(graph)
        optimizers = self.trainer.inventory.optimizers.values()
        trained = {id(variable) for optimizer in optimizers for variable in optimizer.all_variables}
        for variable, value in shared.variables if shared else ():
            own, again = tf_variable(variable), any(variable is one for one in shared.pulled_again)
            if id(own) in trained and (
                assigned.from_itself(own.handle, value) or (again and assigned.any_to(own.handle))
            ):
                raise UsageError(
                    f"{variable_path(variable)} {variable.shape}: besides its optimizer, the step assigns this weight "
                    "itself, and other workers would compute with the value meanwhile, or their updates be lost; "
                    "compute with values that are not assigned (docs/cookbook.md has SAM), give the layer a "
                    "constraint, or train with one worker"
                )
        for variable in self.trainer.inventory.added_to:
            if assigned.from_itself(variable.handle):
                raise UsageError(
                    f"{variable_path(variable)} {variable.shape.as_list()}: the step assigns a value computed from its "
                    "own value, which other workers change meanwhile, so updates would be lost; add the change, "
                    "by variable.assign_add(new - variable) (a layer that compute_gradients or minimize calls may also "
                    "assign a multiple of the value plus something), or make it with aggregation='only_first_replica' "
                    "if any worker's value is right"
                )

    @contextlib.contextmanager
    def restoring(self):
        """Restores the state after this context, by `make_restorer`."""
        restore = self.make_restorer()
        try:
            yield
        finally:
            restore()

    def make_restorer(self) -> Callable[[], None]:
        """Copies every variable; returns a function that restores the copies, the optimizers' settings and the step.

        The copy is in the memory of the host of the variable's device: a GPU need not have room for two.
        """
        components = [component for variable in self.variables() for component in per_replica.components(variable)]
        step, is_whole, before = self.step, self.is_whole, []
        settings = [(optimizer, optimizer.settings) for optimizer in Inventory(self.trainer).optimizers.values()]
        for component in components:
            with tf.device(host_device(component.device)):  # a parameter server's host has its variables' copies
                before.append(tf.identity(component))

        def restore() -> None:
            for component, value in zip(components, before, strict=True):
                component.assign(value)
            for optimizer, values in settings:
                optimizer.restore_settings(values)
            self.step, self.is_whole = step, is_whole

        return restore

    def updated(self) -> dict[str, list[str]]:
        """Returns the names of the variables of each optimizer and each weights' average, in its order."""
        owners: dict[str, Any] = {}  # by their paths in the trainer
        for path, optimizer in Inventory(self.trainer).optimizers.items():
            owners[path] = optimizer
            if optimizer.weight_average is not None:
                owners[f"{path}.weight_average"] = optimizer.weight_average
        names = {id(tf_variable(node)): graph.key_prefix(path) for path, node in graph.walk(self.checkpoint)}
        return {
            path: [names.get(id(tf_variable(variable)), variable_path(variable)) for variable in owner.all_variables]
            for path, owner in owners.items()
        }

    def matching(self, manifest: Manifest) -> Matching:
        """Returns how this state matches by name a checkpoint of a run that may have trained other variables.

        A variable's slots are restored with its count of updates, or are new with a count of 0; an average that the
        checkpoint lacks begins at the variable, and an `Averaged` model at its model. A Keras optimizer's state and the
        reduction's memory, which are not kept by name, are restored if all variables are the same, else they are new.
        """
        before, now = manifest.about.get("updated", {}), self.updated()
        memory = graph.key_prefix(("trainer", "reduction"))
        moved: dict[str, graph.Moved] = {}
        averaged = [graph.key_prefix(("trainer", *path.split("."))) for path in Inventory(self.trainer).averaged]
        tops, together = [memory, graph.key_prefix(("trainer", "loss_scale")), *averaged], [memory, *averaged]
        fixed_shape: list[str] = []
        for path, optimizer in Inventory(self.trainer).optimizers.items():
            at = ("trainer", *path.split("."))
            tops.append(graph.key_prefix(at))
            # Local SGD's replicas have counts of their own: neither kind of slots can use the other's.
            fixed_shape += [
                graph.checkpoint_key((*at, name)) for name in ("iterations", "learning_rate_scale", "update_counts")
            ]
            together += [*_slot_prefixes(at, optimizer), graph.key_prefix((*at, "keras_optimizer"))]
            theirs = before.get(path, now[path])
            moved |= _moved_slots(at, optimizer, theirs, now[path])
            if _by_table(theirs).keys() != _by_table(now[path]).keys():
                moved[memory] = graph.Moved(())
            average = f"{path}.weight_average"
            for position, name in enumerate(now[average] if before.get(average) else ()):
                there = [str(before[average].index(name))] if name in before[average] else []
                moved[_shadow_key(at, str(position))] = graph.Moved(tuple(_shadow_key(at, shadow) for shadow in there))
        return Matching(moved, tuple(tops), together, fixed_shape, self._reset_unrestored, self._reset_rows)

    def _reset_unrestored(self, is_new: Callable[[str], bool]) -> None:
        """Resets the counts of slots, and the averages, that were not restored."""
        for path, optimizer in Inventory(self.trainer).optimizers.items():
            at, average = ("trainer", *path.split(".")), optimizer.weight_average
            is_keras_new = is_new(graph.key_prefix((*at, "keras_optimizer")))
            new = [is_keras_new or is_new(slots) for slots in _slot_prefixes(at, optimizer)]
            if any(new):
                optimizer.update_counts.assign(np.where(new, 0, optimizer.update_counts.numpy()))
            if is_keras_new and isinstance(optimizer, KerasOptimizer):
                optimizer.keras_optimizer.iterations.assign(optimizer.iterations)
            if average is not None:
                average.reset([n for n in range(len(average.shadows)) if is_new(_shadow_key(at, str(n)))])
        for path, averaged in Inventory(self.trainer).averaged.items():
            if is_new(graph.key_prefix(("trainer", *path.split(".")))):
                averaged.reset()

    def _reset_rows(self, shard: tf.Variable, rows: tf.Tensor, is_new: Callable[[str], bool]) -> None:
        """Resets the slots of rows of a table's shard that were restored."""
        for path, optimizer in Inventory(self.trainer).optimizers.items():
            at = ("trainer", *path.split("."))
            for variable, slots in zip(optimizer.all_variables, _slot_prefixes(at, optimizer), strict=True):
                if variable is shard and not is_new(slots) and not is_new(graph.key_prefix((*at, "keras_optimizer"))):
                    optimizer.reset_rows(shard, rows)

    @property
    def rules(self) -> int:
        """The version of the rules that decide this run's bits, see `RULES`."""
        return RULES if self.trainer.inventory.repeats_seeds else RULES - 1

    def host_state(self) -> dict:
        """Returns the plain JSON part of the state."""
        optimizers = Inventory(self.trainer).optimizers.items()
        check_extra(self.extra)  # the program may have changed it since
        settings = {path: changed for path, optimizer in optimizers if (changed := optimizer.changed_settings)}
        content = {"settings": settings, "extra": self.extra}
        return {"jit": self.jit, "rules": self.rules, **{name: values for name, values in content.items() if values}}

    def restore_host_state(self, values: dict) -> None:
        """Restores the plain JSON part, and the step from its variable."""
        self.step, self.is_whole = int(self.step_variable.numpy()), True
        self.jit = values.get("jit")
        if not isinstance(extra := values.get("extra", {}), dict):
            raise UsageError(f"extra is of type {type(extra).__name__}, not a dictionary")
        self.extra = extra
        for path, optimizer in Inventory(self.trainer).optimizers.items():
            optimizer.restore_settings({**optimizer.built_settings, **values.get("settings", {}).get(path, {})})

    @property
    def freezing(self) -> Freezing:
        """The weights that are frozen at the run's step."""
        return self.trainer.inventory.freezing


def _slot_prefixes(at: tuple[str, ...], optimizer: Optimizer) -> list[str]:
    """Returns the key prefixes of the slots of each variable of an optimizer."""
    variables = enumerate(optimizer.all_variables)
    return [graph.key_prefix((*at, "slots", state_key(variable, position))) for position, variable in variables]


def _moved_slots(
    at: tuple[str, ...], optimizer: Optimizer, before: list[str], now: list[str]
) -> dict[str, graph.Moved]:
    """Returns where a checkpoint has the slots and counts of an optimizer's variables, by key prefixes here.

    Args:
      at: the attributes from the state to the optimizer.
      before: names of the variables of the checkpoint's optimizer, in its order; tables may have had other shards.
      now: names of the variables of the optimizer here.
    """
    theirs, variables = _by_table(before), optimizer.all_variables
    counts, positions, moved = graph.checkpoint_key((*at, "update_counts")), [0] * len(now), {}
    for name, numbers in _by_table(now).items():
        for shard, number in enumerate(numbers):
            variable, there = variables[number], theirs.get(name, [])
            key = state_key(variable, number)
            leaf = key.partition("_")[2]
            slots = tuple(graph.key_prefix((*at, "slots", f"{position:04d}_{leaf}")) for position in there)
            if before != now or is_shard(variable):
                table = table_identity(variable)
                moved[graph.key_prefix((*at, "slots", key))] = graph.Moved(slots, shard, len(numbers), table=table)
            positions[number] = there[0] if there else None
    if before == now:
        return moved
    moved[counts] = graph.Moved((counts,), positions=tuple(positions))
    return {**moved, graph.key_prefix((*at, "keras_optimizer")): graph.Moved(())}


def _shadow_key(at: tuple[str, ...], position: str) -> str:
    return graph.key_prefix((*at, "weight_average", "shadows", position))


def _by_table(names: list[str]) -> dict[str, list[int]]:
    """Returns the positions of variables by name; those of a table's shards by the table's name."""
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(re.sub(r"/shards/\d+/$", "/shards/", name), []).append(position)
    return positions


def host_device(device: str) -> str:
    """Returns the CPU of a device's task, in whose memory the device's values can be kept."""
    spec = tf.DeviceSpec.from_string(device)
    return device if spec.device_type in (None, "CPU") else spec.replace(device_type="CPU", device_index=0).to_string()
