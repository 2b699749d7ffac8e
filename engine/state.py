"""A run's state: everything that a checkpoint holds, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import tensorflow as tf

from .checkpoints import snapshot
from .data.position import Position
from .reduction import per_replica
from .trainer import Trainer

# The version of the rules by which a run's numbers come about. A change that alters bits takes the next number, so that
# no run continues unnoticed with other bits than it began with. Checkpoints that name none are of rules 1. Since 2
# `data.order` mixes an epoch's key and shuffles in eight rounds; since 3 the bias corrections of averages, in Adam,
# RMSprop and the weights' average, are no differences of float32 numbers; since 4 float16's losses are in the range of
# means on replicas too; since 5 an AUC's buckets are by the logit; since 6 JPEGs are decoded by the accurate transform;
# since 7 the gain of an RMS normalisation does not decay, and fields of a table of any ids are told apart by a hash.
RULES = 7


class TrainState:
    """A run's state: variables (in `checkpoint`) and plain values (in `host_state`).

    Attributes:
      trainer: the `Trainer`: models, optimizers with their slots, loss scale, averages.
      input: where streamed training data stands.
      step: updates done, as the host counts them; `step_variable`, scalar int64, is what a checkpoint keeps.
      jit: whether the training loop is one XLA program; None before that is decided. XLA rounds otherwise than
        TensorFlow's executor, so a resumed run has to keep the choice; a process that can't follow it leaves it as it
        is (`Strategy.without_jit`).
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.step = 0
        self.jit: bool | None = None

    def build(self) -> None:
        """Makes the step counter. Host code, in the strategy's scope."""
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.step_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="step", aggregation=aggregation)
        self.input = Position()
        self.checkpoint = tf.train.Checkpoint(trainer=self.trainer, step=self.step_variable, input=self.input)

    def advance(self, steps: int) -> None:
        """Counts steps that no inner loop has counted. Does not wait for the device."""
        self.step += steps
        self.step_variable.assign(self.step)

    def variables(self) -> list[tf.Variable]:
        """Returns every variable of the checkpoint, each once."""
        found = {}
        for _, trackable in snapshot.walk(self.checkpoint):
            variable = getattr(trackable, "value", None) if not isinstance(trackable, tf.Variable) else trackable
            if isinstance(variable, tf.Variable):
                found[id(variable)] = variable
        return list(found.values())

    @contextlib.contextmanager
    def kept(self):
        """Restores every variable, and the step, as they were, after the body."""
        put_back = self.copied()
        try:
            yield
        finally:
            put_back()

    def copied(self) -> Callable[[], None]:
        """Copies every variable; returns a function that restores the copies, and the step.

        The copy is held by the host of the device that has the variable: a GPU need not have room for two.
        """
        components = [component for variable in self.variables() for component in per_replica.components(variable)]
        step, before = self.step, []
        for component in components:
            with tf.device(host_of(component.device)):  # a parameter server's host keeps its variables' copies
                before.append(tf.identity(component))

        def put_back() -> None:
            for component, value in zip(components, before, strict=True):
                component.assign(value)
            self.step = step

        return put_back

    def host_state(self) -> dict:
        """Returns the plain JSON part of the state."""
        return {"jit": self.jit, "rules": RULES}

    def restore_host_state(self, values: dict) -> None:
        """Restores the plain JSON part, and the step from its variable."""
        self.step = int(self.step_variable.numpy())
        self.jit = values.get("jit")


def host_of(device: str) -> str:
    """Returns the CPU in whose memory a device's values can be kept: its task's; a CPU itself."""
    spec = tf.DeviceSpec.from_string(device)
    return device if spec.device_type in (None, "CPU") else spec.replace(device_type="CPU", device_index=0).to_string()
