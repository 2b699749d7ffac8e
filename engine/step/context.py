"""The context of one step on a replica: its step, replica and random numbers. Replica code.

Like `tf.distribute.get_replica_context()` it is available anywhere while the step is traced, and only then. Each
replica is traced in a thread of its own, and a thread sees its own context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from .. import randomness
from ..errors import UsageError
from ..internals.tensorflow import is_in_function
from ..internals.variables import assign_local
from ..mesh.layout import Mesh
from .options import Applied

_entered: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step", default=None)


def step_context() -> StepContext:
    """Returns the context of the step that this thread is tracing; an empty one outside of steps.

    Example:
      >>> def noisy(features):  # in a step: different noise at each call, step and replica, the same after a resume
      ...     return features + tf.random.stateless_normal(tf.shape(features), step_context().seed())
    """
    return _entered.get() or StepContext()


class TracedLoss(NamedTuple):
    """A call of a trainer's loss or metrics, for the checks of a step: its arguments, and what it returned."""

    owner: str
    outputs: Any
    batch: Any
    result: Any


@dataclasses.dataclass(eq=False)
class StartValues:
    """Values that a step reads once, as it begins, and uses even if others change the variables meanwhile.

    They are few, since a replica has its variables; those of variables that are elsewhere are a subclass's.

    Attributes:
      loss_scale: scalar float32, by which the step's losses are multiplied; None is 1.
      accumulators: the value that each variable to which replicas add last had on all of them, by the variable's `id`.
      aggregated: the ops that may have written each variable when it was last aggregated, by the variable's `id`.
      replaces_variables: whether layers compute with the values of `read` instead of their variables.
    """

    loss_scale: tf.Tensor | None = None
    accumulators: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    aggregated: dict[int, int] = dataclasses.field(default_factory=dict)
    replaces_variables = False

    def read(self) -> list[tuple[tf.keras.Variable, tf.Tensor]]:
        """Returns variables with the values with which layers compute instead, some read now."""
        return []

    def up_to_date(self, is_once: bool) -> StartValues:
        """Returns these values as the step has last written them, see `StepContext.up_to_date`."""
        return self

    def read_before(self, variable: tf.Variable) -> list[tf.Tensor]:
        """Returns what was read of a variable as the step began, which is to come before it is read again."""
        return []


@dataclasses.dataclass(eq=False, kw_only=True)
class StepContext:
    """The values that differ by step or replica and can't be arguments. Entered by `with`.

    Attributes:
      graph: the graph of the step itself, where replicas may exchange values, not of a branch, loop or function in it.
      step: scalar int64, steps of training done before this one.
      replica: scalar int32, by which this replica samples: its id in the strategy; on a mesh, its data coordinate; 0
        if replicas compute the same examples.
      shard: scalar int32, by which sharded layers sample: equal on replicas with the same shard and examples.
      has_examples: scalar bool, whether this replica has any; None if it always has.
      collect_norm: scalar bool, whether this step's gradient norm, which is costly, will be read; None is never.
      batch_number: scalar int64, from 0 in each evaluation, from another number in each prediction; None in training.
      generators: the seed generators of Keras's layers, see `seed_layers`, and by which one's state each samples.
      micro_batch: which of this replica's micro-batches is computed: an int or scalar int32.
      sampled: how many random numbers of each kind were sampled so far.
      layer_states: the generators' states in this micro-batch, for layers that compute with `start_values`.
      frozen: the `id`s of the tf.Variables that this step does not update.
      applied: the record in which the code that applies an option marks it.
      counts_ids: whether ids and labels out of range are counted, since kernels do not raise for them (`diagnosis`).
      outside: the counts so far of ids and labels out of range: (the metric's name, its pair).
      batch: this replica's local batch.
      batch_size: the number of examples of every global batch; None if it may differ.
      losses: the calls of losses and metrics so far.
      note_write: called with a variable and the indices of rows that are written next, also if the step is skipped.
    """

    graph: tf.Graph | None = None
    step: Any = None
    replica: Any = None
    shard: tf.Tensor | None = None
    has_examples: tf.Tensor | None = None
    collect_norm: tf.Tensor | None = None
    batch_number: tf.Tensor | None = None
    run_seed: int = 0
    updates_before: tf.Variable | None = None
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    start_values: StartValues = dataclasses.field(default_factory=StartValues)
    generators: Sequence[tuple[tf.keras.random.SeedGenerator, int]] = ()
    micro_batch: int | tf.Tensor = 0
    sampled: Counter = dataclasses.field(default_factory=Counter)
    layer_states: Sequence[tuple[tf.keras.Variable, tf.Tensor]] = ()
    frozen: frozenset[int] = frozenset()
    applied: Applied = dataclasses.field(default_factory=Applied)
    counts_ids: bool = False
    outside: list[tuple] = dataclasses.field(default_factory=list)
    batch: Any = None
    batch_size: int | None = None
    losses: list[TracedLoss] = dataclasses.field(default_factory=list)
    note_write: Callable[[tf.Variable, tf.Tensor], None] = lambda *_: None

    def __enter__(self) -> StepContext:
        self._token = _entered.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.reset(self._token)

    @property
    def is_training(self) -> bool:
        """Whether a training step is being traced."""
        return self.step is not None and self.batch_number is None

    def seed(self, name: str | None = None, *, common: bool = False, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """Returns a seed for `tf.random.stateless_*`, [2], that is unique in the run.

        It differs by the run's seed, the step, the replica, the micro-batch and the call: calls are numbered as the
        step is traced, from 0 in each step. A resumed run samples the same, as does the backward pass of a block that
        `recomputed` computes again. In evaluation the seed differs by batch instead of step: each evaluation samples
        the same, and differently from training; each call of `predict` draws other samples.

        A call within a `tf.while_loop` of your own is traced once: all iterations get one seed.

        Args:
          name: calls with the same name return the same seed in the same micro-batch of the same step; no other call
            returns it.
          common: whether all replicas get the same seed, for what they add to a sum over replicas, such as noise on
            gradients. On a mesh the seed differs by the shard of the model.

          dtype: int64, or int32, which TensorFlow Probability takes.

        Raises:
          UsageError: it is called outside of a step, and would return the same each time; or in a `tf.function`, which
            calls it once for all of its calls; or the name is not a string.
        """
        if self.step is None or self.replica is None:
            raise UsageError(
                "step_context().seed() was called outside of a step; call it in train_step, eval_step or what they call"
            )
        if name is not None and not isinstance(name, str):
            raise UsageError(
                f"step_context().seed({name!r}): the name of a seed is a string, such as seed(name='noise')"
            )
        self._check_traced_here("step_context().seed()", "call it outside, and pass the seed as an argument")
        kind, which = ("common", self.mesh.model.rank) if common else ("call", self.replica)
        use = (kind, self._number(kind)) if name is None else ("common name" if common else "name", name)
        return tf.cast(self._seed(which, *use), dtype)

    def keras_seed(self) -> tf.Tensor:
        """Returns the seed of the next call of `keras.random` without one, [2] int64, which is unique in the run.

        Raises:
          UsageError: it is called in a `tf.function`, see `seed`.
        """
        self._check_traced_here(
            "keras.random", "pass seed=self.seeds, with self.seeds = keras.random.SeedGenerator() made in build"
        )
        return self._seed(self.replica, "keras", self._number("keras"))

    def seed_layers(self, assigns: bool = True) -> None:
        """Makes Keras's layers sample by this step, replica and micro-batch from here on: sets generators' states.

        Args:
          assigns: whether to write the states; else they are only in `layer_states`.
        """
        if not self.generators:
            return
        use, count = self._number("layers"), len(self.generators)

        def states(replica):
            return tf.unstack(randomness.states(self._seed(replica, "layers", use), count))

        # If replicas have the same examples, most layers sample the same.
        within_shard = [getattr(generator, "within_shard", False) for generator, _ in self.generators]
        by_replica = states(self.replica)
        by_shard = states(self.shard) if any(within_shard) else by_replica
        self.layer_states = [
            (generator.state, (by_shard if is_within else by_replica)[first])
            for (generator, first), is_within in zip(self.generators, within_shard, strict=True)
        ]
        for variable, state in self.layer_states if assigns else ():
            assign_local(variable.value, state)

    @property
    def values(self) -> list[tuple[tf.keras.Variable, tf.Tensor]]:
        """The values with which layers compute instead of their variables, some read now; empty if they read these."""
        return [*self.start_values.read(), *self.layer_states] if self.start_values.replaces_variables else []

    def up_to_date(self, is_once: bool = True) -> StepContext:
        """Returns a context, which samples as this one, whose `start_values` are what the step last gave to variables.

        Args:
          is_once: whether the code that is traced here runs once per step, or in a loop of the engine's. Otherwise it
            may follow what is traced after it, so all is read again.
        """
        values = self.start_values
        now = values.up_to_date(is_once) if values.replaces_variables else values
        return dataclasses.replace(self, start_values=now)

    def micro_batch_contexts(self, count: int) -> Callable[[int | tf.Tensor], contextlib.AbstractContextManager]:
        """Divides this replica's computation into micro-batches, which sample independently.

        Each numbers its samples from the same number on, whatever was traced before, also if one trace serves several.

        Returns:
          A function of a micro-batch's number that enters its context.
        """
        sampled = Counter(self.sampled)

        @contextlib.contextmanager
        def enter(number):
            number = self.micro_batch * count + number
            context = dataclasses.replace(self, micro_batch=number, sampled=Counter(sampled))
            context.seed_layers(assigns=not self.start_values.replaces_variables)
            with context:
                yield
            self.sampled |= context.sampled  # the maximum of each kind, so that later samples differ from all of these

        return enter

    def copy(self) -> StepContext:
        """Copies the context: the copy samples from here on as this one does."""
        return dataclasses.replace(self, sampled=Counter(self.sampled))

    def scaled(self, total: tf.Tensor) -> tf.Tensor:
        """Multiplies a loss by the loss scale, for a backward pass in float16; `Gradients.unscaled` undoes it."""
        scale = self.start_values.loss_scale
        return total if scale is None else total * tf.cast(scale, total.dtype)

    def _check_traced_here(self, call: str, fix: str) -> None:
        """Raises UsageError for a call in a `tf.function`: one trace serves calls in other micro-batches and steps."""
        if self.graph is not None and is_in_function(self.graph):
            raise UsageError(
                f"{call} is in a tf.function, which is traced once, so all of its calls would sample the same; {fix}"
            )

    def _seed(self, replica: int | tf.Tensor, *use: Any) -> tf.Tensor:
        is_evaluation = self.batch_number is not None
        now = self.batch_number if is_evaluation else self.step
        # A second run of a model continues the numbers of the first, or it would sample the same again.
        if self.updates_before is not None and not is_evaluation:
            now += self.updates_before
        key = "evaluation" if is_evaluation else "training", *use
        return randomness.step_seed(self.run_seed, now, replica, self.micro_batch, key)

    def _number(self, kind: str) -> int:
        self.sampled[kind] += 1
        return self.sampled[kind] - 1
