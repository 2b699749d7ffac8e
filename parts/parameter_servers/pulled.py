"""A step around servers: the values that it has pulled, the updates that it pushes, and what it may assign."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.internals.graphs import Assignments, writes
from ...engine.internals.variables import on_server, read_local, server_device, tf_variable, variable_path
from ...engine.optimizers.base import Group, Optimizer, Pairs, Place, Scalars
from ...engine.reduction import wire
from ...engine.reduction.aggregation import described
from ...engine.state import TrainState
from ...engine.step.context import StartValues, step_context
from ...engine.step.gradients import UniqueSlices, sum_duplicate_rows

Values = Sequence[tuple[tf.keras.Variable, tf.Tensor]]


@dataclasses.dataclass(eq=False)
class PulledValues(StartValues):
    """Start values whose variables are on servers, where reading each would take a message.

    Attributes:
      variables: Keras variables with their values.
      pull: reads some of these again, with few messages; returns such pairs.
      pulled_again: the variables that were read again.
      writes: the ops that may have written `variables` before they were read, by the `id` of the variable's handle.
      moved: Keras variables that layers may assign, read when the layers begin to compute.
      progress: the result of `read_progress` of each optimizer, for its next update, by the optimizer's `id`.
      freed: how many rows of a table's shard were freed, and the variable that counts them, by the shard's `id`: a
        worker that is stopped, and whose lease another one has done, may update rows after they were freed.
    """

    variables: Values = ()
    pull: Callable[[Sequence[tf.keras.Variable]], Values] = lambda _: ()
    pulled_again: list[tf.keras.Variable] = dataclasses.field(default_factory=list)
    writes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    moved: Sequence[tf.keras.Variable] = ()
    progress: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    freed: dict[int, tuple[tf.Tensor, tf.Variable]] = dataclasses.field(default_factory=dict)

    @property
    def replaces_variables(self) -> bool:  # type: ignore[override]
        return bool(self.variables or self.moved)

    def read(self) -> list[tuple[tf.keras.Variable, tf.Tensor]]:
        return [*self.variables, *((variable, tf.identity(variable.value)) for variable in self.moved)]

    def up_to_date(self, is_once: bool) -> StartValues:
        counts, here = writes(), tf.compat.v1.get_default_graph()
        old = []
        for variable, value in self.variables:
            handle = id(variable.value.handle)
            if counts[handle] > self.writes.get(handle, 0) or not (is_once or value.graph is here):
                old.append(variable)
        self.pulled_again.extend(old)
        new = {id(variable): value for variable, value in self.pull(old)} if old else {}
        pairs = [(variable, new.get(id(variable), value)) for variable, value in self.variables]
        return dataclasses.replace(self, variables=pairs, writes=counts if old else self.writes)

    def read_before(self, variable: tf.Variable) -> list[tf.Tensor]:
        return [before for before, count in self.freed.values() if count is variable]


def read_progress(optimizer: Optimizer) -> tf.Tensor:
    """Returns an optimizer's iterations, learning_rate_scale and update_counts, float64, on their device."""
    with on_server(optimizer.iterations):
        scale, counts = read_local(optimizer.learning_rate_scale), optimizer.read_counts()
        progress = (read_local(optimizer.iterations), scale, counts)
        return tf.concat([tf.reshape(tf.cast(x, tf.float64), [-1]) for x in progress], 0)


class OnServers(Place):
    """The servers that have the variables: a step sends each its gradients, in as few messages as possible.

    Args:
      reduce_dtype: the dtype in which gradients are sent.
    """

    use_locking = True  # updates of different workers don't interleave

    def __init__(self, reduce_dtype: tf.DType = tf.float32):
        self._reduce_dtype = reduce_dtype
        self.applies = ("Reduction.sum",) if reduce_dtype.size == 2 else ()

    def progress(self, optimizer: Optimizer) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # What the step read as it began. Further updates of it, and one within a condition or loop, read the variables.
        pulled = _pulled().progress.pop(id(optimizer), None)
        if pulled is None or getattr(pulled, "graph", None) is not tf.compat.v1.get_default_graph():
            return super().progress(optimizer)
        return tf.cast(pulled[0], tf.int64), tf.cast(pulled[1], tf.float32), tf.cast(pulled[2:], tf.int64)

    def groups(self, pairs: Pairs, scalars: Scalars) -> Iterator[Group]:
        by_server: dict[str | None, list] = {}  # None: variables of this replica itself
        for gradient, target in pairs:
            by_server.setdefault(server_device(target.variable), []).append((gradient, target))
        for server, group in by_server.items():
            if server is None:
                yield contextlib.nullcontext(), group, scalars
                continue
            group = [(sum_duplicate_rows(gradient), target) for gradient, target in group]
            # Each message costs more than a small step's update.
            values = [tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float32) for g, _ in group]
            with tf.device(server):
                shapes = [
                    tf.concat([tf.shape(gradient.indices), target.variable.shape[1:]], 0)  # the number of rows varies
                    if isinstance(gradient, tf.IndexedSlices)
                    else target.variable.shape
                    for gradient, target in group
                ]
            exact, values = wire.send(list(scalars.values()), values, shapes, server, self._reduce_dtype)
            there = [
                (UniqueSlices(value, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else value, target)
                for (gradient, target), value in zip(group, values, strict=True)
            ]
            yield tf.device(server), there, dict(zip(scalars, exact, strict=True))

    def update_rows(self, target: Any, update: Callable[..., None], **terms: tf.Tensor) -> None:
        """Calls `update(**terms)`, unless rows of the variable were freed since the step began.

        Then the step is one that another worker has done instead, and ids may have other rows by now.
        """
        if id(target.variable) not in (freed := _pulled().freed):
            update(**terms)
            return
        before, count = freed[id(target.variable)]
        with on_server(target.variable):
            here = {name: tf.identity(x) for name, x in terms.items()}
            # Counted only once all terms are there, so that nothing waits for another host between this and the update.
            with tf.control_dependencies([*here.values()]):
                now = tf.raw_ops.ReadVariableOp(resource=count.handle, dtype=count.dtype)

            # Adagrad's and Ftrl's updates return an operation, and the branches have to return alike.
            def apply() -> None:
                update(**here)

            tf.cond(tf.equal(now, before), apply, lambda: None)


def _pulled() -> PulledValues:
    """Returns what the step has pulled; nothing outside of steps."""
    start_values = step_context().start_values
    return start_values if isinstance(start_values, PulledValues) else PulledValues()


def check_added(state: TrainState, graph: tf.Graph, shared: PulledValues | None = None) -> None:
    """Checks that a step around servers only adds to shared variables, or replaces them.

    Without it an assignment would undo what other workers have added meanwhile.

    Args:
      shared: the step's start values, if several workers share the weights that it trains.

    Raises:
      UsageError: it assigns a variable a value computed from its own, or a trained weight a value for a time.
    """
    assigned = Assignments(graph)
    optimizers = state.trainer.inventory.optimizers.values()
    trained = {id(variable) for optimizer in optimizers for variable in optimizer.all_variables}
    read, read_again = (shared.variables, shared.pulled_again) if shared else ((), ())
    for variable, value in read:
        own, again = tf_variable(variable), any(variable is one for one in read_again)
        if id(own) in trained and (assigned.from_itself(own.handle, value) or (again and assigned.any_to(own.handle))):
            raise UsageError(
                f"{variable_path(variable)} {variable.shape}: besides its optimizer, the step assigns this weight "
                "itself, and other workers would compute with the value meanwhile, or their updates be lost; "
                "compute with values that are not assigned (docs/cookbook.md has SAM), give the layer a "
                "constraint, or train with one worker"
            )
    for variable in state.trainer.inventory.added_to:
        if assigned.from_itself(variable.handle):
            raise UsageError(
                f"{described(variable)}: the step assigns a value computed from its own value, which other workers "
                "change meanwhile, so updates would be lost; add the change, by assign_add(new - variable) of the "
                "tf.Variable, which of a Keras variable is its .value (a layer that compute_gradients or minimize "
                "calls may also assign a multiple of the value plus something), or make it with "
                "aggregation='only_first_replica' if any worker's value is right"
            )
