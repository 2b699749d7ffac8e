"""A run's state: everything that a checkpoint has, and nothing else. Runs on the host."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from . import logging
from .checkpoints import Manifest, Matching, objects
from .checkpoints.manifest import check_extra
from .data.feeds.position import Position
from .errors import UsageError
from .internals import keras_calls, keras_optimizers
from .internals.tensorflow import TrackableNode, is_saved_model
from .internals.variables import is_shard, state_key, table_identity, tf_variable, variable_path
from .inventory import Freezing
from .machine import environment
from .optimizers import KerasOptimizer, Optimizer
from .reduction import per_replica
from .trainer import Trainer


class Rule(NamedTuple):
    """A rule that decides a run's bits: orders of examples, random samples, updates.

    Attributes:
      since: the version that has made it what it is.
      applies: whether the numbers of a trainer's run depend on it.
    """

    since: str
    applies: Callable[[Trainer], bool]


# A change that alters bits adds a rule, or renames one, so that no run continues unnoticed with other bits than it
# began with. New ones come last: runs of 0.1.0 have kept their number.
RULES = {
    "examples, samples and updates": Rule("0.1.0", lambda trainer: True),
    "layers of one seed sample alike": Rule("0.1.0", lambda trainer: trainer.inventory.repeats_seeds),
    "a call without training computes as in inference": Rule(
        "0.1.0", lambda trainer: not all(map(keras_calls.takes_training, trainer.inventory.models))
    ),
    "float16 has one range on any number of replicas": Rule(
        "1.0.0", lambda trainer: trainer.inventory.loss_scale is not None
    ),
    "a model's own step weighs gradients through sums over replicas by their examples": Rule(
        "1.0.0", lambda trainer: trainer.run_context.has_unequal_shares and trainer.exchanges_in_own_step
    ),
    "weights of classes are not rounded twice": Rule("1.0.0", lambda trainer: trainer.run_context.rounds_class_weights),
}
_FIRST_NUMBER = 9


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
      hook_state: hooks' state that is not plain JSON.
      step: number of steps that the host has asked for; a checkpoint keeps `step_variable`, scalar int64.
      jit: whether the training loop is one XLA program; None before that is decided. XLA rounds differently from
        TensorFlow's executor, so a resumed run keeps the choice; a process that can't follow it leaves it unchanged
        (`Strategy.no_jit_reason`).
      by_rows: whether the run began when an update by a sparse gradient moved its rows alone in any variable, and goes
        on so (`Optimizer.moves_all_rows`).
      is_whole: whether all variables are those of `step`, so that they may be saved. They are not while a compiled call
        changes them, nor after one that was interrupted, until a checkpoint is restored.
      is_resumed: whether the program resumes a run that an earlier process began.
      is_saved: whether the run writes checkpoints.
      extra: the program's own values, plain JSON by name.
      named_idle: the handles' `id`s of trainable variables that no optimizer updates, and that were named.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.step = 0
        self.jit: bool | None = None
        self.by_rows = False
        self.is_whole = True
        self.is_resumed = self.is_saved = False
        self.extra: dict[str, Any] = {}
        self.named_idle: set[int] = set()
        self._steps: set[str] = set()  # digests of this process's
        self._steps_before: dict[str, Any] = {}  # of the attempt that is resumed, with its versions

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
        self.hook_state = HookState()
        others = {"step": self.step_variable, "input": self.input, "of_hooks": self.hook_state}
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
        for _, trackable in objects.walk(self.checkpoint):
            variable = getattr(trackable, "value", None) if not isinstance(trackable, tf.Variable) else trackable
            if isinstance(variable, tf.Variable):
                variables[id(variable)] = variable
        return list(variables.values())

    def variable_specs(self) -> list[str]:
        """Returns the key of each variable in checkpoints, with its dtype and shape, sorted."""
        names = self._names()
        return sorted(f"{names[id(v)]} {v.dtype.name} {v.shape}" for v in self.variables())

    def loaded_variables(self) -> list[tf.Variable]:
        """Returns the variables of SavedModels in attributes."""
        loaded = (node for _, node in objects.walk(self.checkpoint) if is_saved_model(node))
        return [part for node in loaded for _, part in objects.walk(node) if isinstance(part, tf.Variable)]

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
        flags = self.trainer.inventory.trainable_flags
        settings = [(optimizer, optimizer.settings) for optimizer in self.trainer.inventory.optimizers.values()]
        for component in components:
            with tf.device(host_device(component.device)):  # a parameter server's host has its variables' copies
                before.append(tf.identity(component))

        def restore() -> None:
            for component, value in zip(components, before, strict=True):
                component.assign(value)
            for optimizer, values in settings:
                optimizer.restore_settings(values)
            self.trainer.inventory.restore_flags(flags)
            self.step, self.is_whole = step, is_whole

        return restore

    def updated(self) -> dict[str, list[str]]:
        """Returns the names of the variables of each optimizer and each weights' average, in its order."""
        owners: dict[str, Any] = {}  # by their paths in the trainer
        for path, optimizer in self.trainer.inventory.optimizers.items():
            owners[path] = optimizer
            if optimizer.weight_average is not None:
                owners[f"{path}.weight_average"] = optimizer.weight_average
        names = self._names()
        return {
            path: [names.get(id(tf_variable(variable)), variable_path(variable)) for variable in owner.all_variables]
            for path, owner in owners.items()
        }

    def optimizer_settings(self) -> dict[str, dict[str, Any]]:
        """Returns the class and the settings as built, without rates, of each optimizer that no flag has made."""
        optimizers = self.trainer.inventory.optimizers.items()
        return {
            path: {**x.built_settings, "name": type(getattr(x, "keras_optimizer", x)).__name__}
            for path, x in optimizers
            if not x.from_options
        }

    def final_averages(self) -> dict[str, str]:
        """Returns the keys of averages that replace weights as training ends (`use_ema`), by the keys of these."""
        optimizers = self.trainer.inventory.optimizers.values()
        kept = [optimizer.keras_optimizer for optimizer in optimizers if isinstance(optimizer, KerasOptimizer)]
        pairs = [pair for optimizer in kept if optimizer.use_ema for pair in keras_optimizers.averages(optimizer)]
        names = self._names() if pairs else {}
        return {names[id(weight)]: names[id(shadow)] for weight, shadow in pairs if id(weight) in names}

    def _names(self) -> dict[int, str]:
        return {id(tf_variable(node)): objects.key_prefix(path) for path, node in objects.walk(self.checkpoint)}

    def matching(self, manifest: Manifest) -> Matching:
        """Returns how this state matches by name a checkpoint of a run that may have trained other variables.

        A variable's slots are restored with its count of updates, or are new with a count of 0; an average that the
        checkpoint lacks begins at the variable, and an `Averaged` model at its model. A Keras optimizer's state and the
        reduction's memory, which are not kept by name, are restored if all variables are the same, else they are new.
        """
        before, now = manifest.about.get("updated", {}), self.updated()
        memory = objects.key_prefix(("trainer", "reduction"))
        moved: dict[str, objects.Moved] = {}
        averaged = [objects.key_prefix(("trainer", *path.split("."))) for path in self.trainer.inventory.averaged]
        tops, together = [memory, objects.key_prefix(("trainer", "loss_scale")), *averaged], [memory, *averaged]
        fixed_shape: list[str] = []
        for path, optimizer in self.trainer.inventory.optimizers.items():
            at = ("trainer", *path.split("."))
            tops.append(objects.key_prefix(at))
            # Local SGD's replicas have counts of their own: neither kind of slots can use the other's.
            fixed_shape += [
                objects.checkpoint_key((*at, name)) for name in ("iterations", "learning_rate_scale", "update_counts")
            ]
            together += [*_slot_prefixes(at, optimizer), objects.key_prefix((*at, "keras_optimizer"))]
            theirs = before.get(path, now[path])
            moved |= _moved_slots(at, optimizer, theirs, now[path])
            if _by_table(theirs).keys() != _by_table(now[path]).keys():
                moved[memory] = objects.Moved(())
            average = f"{path}.weight_average"
            for position, name in enumerate(now[average] if before.get(average) else ()):
                there = [_shadow_key(at, before[average].index(name))] if name in before[average] else []
                moved[_shadow_key(at, position)] = objects.Moved(tuple(there))
        return Matching(moved, tuple(tops), together, fixed_shape, self._reset_unrestored, self._reset_rows)

    def _reset_unrestored(self, is_new: Callable[[str], bool]) -> None:
        """Resets the counts of slots, and the averages, that were not restored."""
        for path, optimizer in self.trainer.inventory.optimizers.items():
            at, average = ("trainer", *path.split(".")), optimizer.weight_average
            is_keras_new = is_new(objects.key_prefix((*at, "keras_optimizer")))
            new = [is_keras_new or is_new(slots) for slots in _slot_prefixes(at, optimizer)]
            if any(new):
                optimizer.update_counts.assign(np.where(new, 0, optimizer.update_counts.numpy()))
            if is_keras_new and isinstance(optimizer, KerasOptimizer):
                optimizer.keras_optimizer.iterations.assign(optimizer.iterations)
            if average is not None:
                average.reset([n for n in range(len(average.shadows)) if is_new(_shadow_key(at, n))])
        for path, averaged in self.trainer.inventory.averaged.items():
            if is_new(objects.key_prefix(("trainer", *path.split(".")))):
                averaged.reset()

    def _reset_rows(self, shard: tf.Variable, rows: tf.Tensor, is_new: Callable[[str], bool]) -> None:
        """Resets the slots of rows of a table's shard that were restored."""
        for path, optimizer in self.trainer.inventory.optimizers.items():
            at = ("trainer", *path.split("."))
            for variable, slots in zip(optimizer.all_variables, _slot_prefixes(at, optimizer), strict=True):
                if variable is shard and not is_new(slots) and not is_new(objects.key_prefix((*at, "keras_optimizer"))):
                    optimizer.reset_rows(shard, rows)

    @property
    def rules(self) -> list[str]:
        """The names of the rules that decide this run's bits, see `RULES`."""
        return [name for name, rule in RULES.items() if rule.applies(self.trainer)]

    def changed_rules(self, values: dict) -> dict[str, str]:
        """Returns the rules by which a run goes on with other bits than it began with, and the versions that made them.

        Args:
          values: the `host_state` of the run when it was saved.
        """
        saved = values.get("rules", _FIRST_NUMBER - 1)
        if isinstance(saved, int):
            saved = [*RULES][: saved - _FIRST_NUMBER + 1]
        changed = {name: RULES[name].since for name in self.rules if name not in saved}
        return {**changed, **{name: "a later version" for name in saved if name not in RULES}}

    def note_step(self, digest: str) -> None:
        """Notes the digest of a traced training step; logs if another build's differs, which trained the run before."""
        now, before, self._steps_before = environment.versions(), self._steps_before, {}
        if before.get("versions") == now:
            self._steps.update(before["digests"])
        elif before and digest not in before["digests"]:
            others = ", ".join(f"{name} {value}" for name, value in before["versions"].items() if value != now[name])
            logging.warning(
                "the step computes otherwise than in the attempt before, of %s: the run's numbers may differ",
                others,
            )
        self._steps.add(digest)

    def host_state(self) -> dict:
        """Returns the plain JSON part of the state."""
        optimizers = self.trainer.inventory.optimizers.items()
        check_extra(self.extra)  # the program may have changed it since
        settings = {path: changed for path, optimizer in optimizers if (changed := optimizer.changed_settings)}
        inventory = self.trainer.inventory
        flags = [] if inventory.trainable_flags == inventory.built_flags else inventory.trainable_flags
        content = {"settings": settings, "extra": self.extra, "trainable": flags}
        if self._steps:
            content["steps"] = {"versions": environment.versions(), "digests": sorted(self._steps)}
        kept = {name: values for name, values in content.items() if values}
        return {"jit": self.jit, "by_rows": self.by_rows, "rules": self.rules, **kept}

    def restore_host_state(self, values: dict) -> None:
        """Restores the plain JSON part, and the step from its variable."""
        self.step, self.is_whole = int(self.step_variable.numpy()), True
        self.jit, self.by_rows = values.get("jit"), values.get("by_rows", True)
        self._steps_before = values.get("steps", {})
        if not isinstance(extra := values.get("extra", {}), dict):
            raise UsageError(f"extra is of type {type(extra).__name__}, not a dictionary")
        self.extra = extra
        self.trainer.inventory.restore_flags(values.get("trainable", []))
        for path, optimizer in self.trainer.inventory.optimizers.items():
            optimizer.restore_settings({**optimizer.built_settings, **values.get("settings", {}).get(path, {})})
            optimizer.moves_all_rows = type(optimizer).moves_all_rows and not self.by_rows

    @property
    def freezing(self) -> Freezing:
        """The weights that are frozen at the run's step."""
        return self.trainer.inventory.freezing


def _slot_prefixes(at: tuple[str, ...], optimizer: Optimizer) -> list[str]:
    variables = enumerate(optimizer.all_variables)
    return [objects.key_prefix((*at, "slots", state_key(variable, position))) for position, variable in variables]


def _moved_slots(
    at: tuple[str, ...], optimizer: Optimizer, before: list[str], now: list[str]
) -> dict[str, objects.Moved]:
    """Returns where a checkpoint has the slots and counts of an optimizer's variables, by key prefixes here.

    Args:
      at: the attributes from the state to the optimizer.
      before: names of the variables of the checkpoint's optimizer, in its order; tables may have had other shards.
      now: names of the variables of the optimizer here.
    """
    theirs, variables = _by_table(before), optimizer.all_variables
    counts, moved = objects.checkpoint_key((*at, "update_counts")), {}
    positions: list[int | None] = [None] * len(now)
    for name, numbers in _by_table(now).items():
        for shard, number in enumerate(numbers):
            variable, there = variables[number], theirs.get(name, [])
            key = state_key(variable, number)
            leaf = key.partition("_")[2]
            slots = tuple(objects.key_prefix((*at, "slots", f"{position:04d}_{leaf}")) for position in there)
            if before != now or is_shard(variable):
                table = table_identity(variable)
                moved[objects.key_prefix((*at, "slots", key))] = objects.Moved(slots, shard, len(numbers), table=table)
            positions[number] = there[0] if there else None
    if before == now:
        return moved
    moved[counts] = objects.Moved((counts,), positions=tuple(positions))
    return {**moved, objects.key_prefix((*at, "keras_optimizer")): objects.Moved(())}


def _shadow_key(at: tuple[str, ...], position: int) -> str:
    return objects.key_prefix((*at, "weight_average", "shadows", str(position)))


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
