"""Checks the variables that a step reads and assigns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import tensorflow as tf

from .. import logging
from ..errors import UsageError
from ..internals import graphs
from ..internals.tensorflow import variables_read
from ..internals.variables import not_implemented, tf_variable, variable_path
from ..optimizers import KerasOptimizer
from ..reduction import per_replica
from ..reduction.aggregation import MEAN, SUM, described
from ..state import TrainState
from ..trainer import Trainer

_ADD_ENTRIES = "assign_add(tf.scatter_nd(indices, updates - tf.gather_nd(variable, indices), variable.shape))"


def check_saved(state: TrainState, graph: tf.Graph) -> None:
    """Checks that a checkpoint would have every variable that a step trains, and all that the program writes.

    Without it a resumed run would go on with other values.

    Raises:
      UsageError: it reads a trainable variable that is not among the trainer's, or writes something that is not.
    """
    held = _handles(state.variables())
    trained = [variable for variable in variables_read(graph) if variable.trainable and id(variable.handle) not in held]
    if trained:
        first = min(trained, key=variable_path)
        raise UsageError(
            f"{type(state.trainer).__name__}: its step uses a trainable variable, {variable_path(first)} "
            f"{first.shape.as_list()}, that is in none of its attributes, so no checkpoint would have it; make it, or "
            f"its model or layer, {state.trainer.run_context.saved_places}, or set trainable=False"
        )
    check_written(state, graph)
    if type(state.trainer).train_step is Trainer.train_step and (idle := _never_updated(state, variables_read(graph))):
        logging.warning(
            "%s: its step uses %s, trainable, that no optimizer updates; to train it, add it to what "
            "trainable_variables(self) returns, a property of the trainer; else set trainable=False",
            type(state.trainer).__name__,
            ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if idle[3:] else ""),
        )


def check_written(state: TrainState, graph: tf.Graph) -> None:
    """Raises UsageError if the program's part of a step writes what no checkpoint has, so a resume would lose it.

    What it only reads is noted: the run is not saved once that changes.
    """
    states = [generator.state.value for generator, _ in state.trainer.inventory.seed_generators]  # set by each step
    held = _handles([*state.variables(), *states])
    others = {id(v.handle): v for v in variables_read(graph) if id(v.handle) not in held}
    for handle, op in graphs.written(graph):
        variable = others.pop(id(handle), None)
        if id(handle) not in held and (line := graphs.program_line(op)):
            _refuse_written(type(state.trainer).__name__, op, variable, line)
    state.trainer.inventory.captured.note_read(others.values())


def _refuse_written(owner: str, op: tf.Operation, variable: tf.Variable | None, line: str) -> None:
    """Raises UsageError for an op of a step that writes what no checkpoint has: a variable, if it is known."""
    if op.type.startswith(("LookupTable", "Iterator", "Queue", "Stack")):
        raise UsageError(
            f"{owner}: its step changes a table, an iterator or a queue ({op.type}, at {line}), and checkpoints "
            "have only variables; keep what it needs in a tf.Variable, an attribute of the trainer"
        )
    named = "a variable" if variable is None else described(variable)
    raise UsageError(
        f"{owner}: its step assigns {named}, at {line}, that is in none of its attributes, so no checkpoint would "
        "have it; assign it, or its layer, metric or generator, to an attribute of the trainer (also in a list, a "
        "dictionary or a tf.Module); a class of your own that makes variables has to be a tf.Module"
    )


def _never_updated(state: TrainState, read: Collection[tf.Variable]) -> list[str]:
    """Returns the paths of trainable variables that a step reads and no optimizer updates; each only once."""
    inventory = state.trainer.inventory
    optimizers = inventory.optimizers.values()
    updated = _handles(v for optimizer in optimizers for v in optimizer.all_variables)
    keras_optimizers = [each.keras_optimizer for each in optimizers if isinstance(each, KerasOptimizer)]
    updated |= _handles(v for optimizer in keras_optimizers for v in optimizer.variables)  # their own
    in_layers = _handles(v for layer in inventory.layers.values() for v in layer.variables)
    weights = _handles(v for v in inventory.all_weights if state.trainer.learning_rate_multiplier(v) != 0)
    # Of layers' variables, those that are frozen on purpose, or have a multiplier of 0, are no mistake, nor those of a
    # loaded SavedModel, which can be frozen in no other way.
    done = state.named_idle | updated | (in_layers - weights) | _handles(state.loaded_variables())
    idle = [v for v in read if v.trainable and id(v.handle) not in done]
    state.named_idle |= _handles(idle)
    return sorted({*map(variable_path, idle)})


def _handles(variables: Iterable) -> set[int]:
    """The `id`s of the handles of variables, Keras's or TensorFlow's: each replica reads and writes its own copy."""
    return {id(copy.handle) for v in variables for copy in per_replica.components(tf_variable(v))}


@contextlib.contextmanager
def updates_explained(replicas: int) -> Iterator[None]:
    """Raises UsageError if a step updates a variable by a method that mirrored variables lack."""
    try:
        yield
    except NotImplementedError as error:
        if not (refused := not_implemented(error)):
            raise
        variable, method = refused
        fix = f"; for entries of a replica's own examples, make it with aggregation='sum', and {_ADD_ENTRIES}"
        if per_replica.differs(variable):  # which is never summed in a step
            fix = ""
        raise UsageError(
            f"{described(variable)}: {method} works on one device only, and there are {replicas} replicas; assign the "
            f"whole value, by assign(tf.tensor_scatter_nd_update(variable, indices, updates)) or similar{fix}"
        ) from error


class SecondTrace:
    """Variables that a step may assign by its batch's size, since it computes with a constant that equals the size.

    A second trace of the step, on three times as many examples, decides: a constant that stays is no size.
    """

    def __init__(self) -> None:
        self._errors: dict[int, UsageError] = {}  # by the variable's `id`
        self._decides = False

    @property
    def is_needed(self) -> bool:
        return bool(self._errors)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Makes a step that is traced within the second trace. A step that takes no other size is refused."""
        self._decides = True
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            raise next(iter(self._errors.values())) from error
        finally:
            self._errors, self._decides = {}, False

    def examples(self, batch):
        """Returns the batch on which to trace a step."""
        if not self._decides:
            return batch
        return tf.nest.map_structure(lambda x: tf.concat([x] * 3, 0), batch, expand_composites=True)

    def refuse(
        self, assignments: graphs.Assignments, variable: tf.Variable, error: Callable[[tf.Variable], UsageError]
    ) -> None:
        """Raises an error if the variable is assigned by the replica's own examples."""
        handles = [copy.handle for copy in per_replica.components(variable)]
        if any(assignments.depend_on_batch(handle) for handle in handles):
            raise error(variable)
        if any(assignments.depend_on_batch(handle, by_size=True) for handle in handles):
            if not self._decides:
                self._errors[id(variable)] = error(variable)
            elif id(variable) in self._errors:
                raise error(variable)


def check_aggregated(
    state: TrainState, graph: tf.Graph, batches: Sequence, replicas: int, second_trace: SecondTrace
) -> None:
    """Checks that each variable that a step assigns from its replica's examples is aggregated: else replicas differ.

    Args:
      batches: batches of the replicas in the graph.
      second_trace: gets the variables on which only a second trace can decide.

    Raises:
      UsageError: a variable has no aggregation, or one that is impossible.
    """
    inventory, reduction = state.trainer.inventory, state.trainer.reduction
    own = [component for variable in inventory.per_replica_variables for component in per_replica.components(variable)]
    assignments = graphs.Assignments(graph, batches, [copy.handle for copy in own])
    by_own = f"each of {replicas} replicas assigns it by its own examples"
    summed = "the batch's result of tf.distribute.get_replica_context().all_reduce('sum', ...)"

    def undeclared(variable: tf.Variable) -> UsageError:
        return UsageError(
            f"{described(variable)}: {by_own}, and it declares no aggregation of these values; make it with "
            "aggregation='sum' if the replicas' additions add up, 'mean', or 'only_first_replica', or assign "
            f"{summed} or, of a minimum or maximum, of its all_gather(...)"
        )

    def trained(variable: tf.Variable) -> UsageError:
        return UsageError(
            f"{described(variable)}: {by_own}, and a trained variable has to be equal on all of them; assign {summed}"
        )

    for variable in inventory.undeclared:
        if id(variable) not in reduction.averaged:  # by the step itself
            second_trace.refuse(assignments, variable, undeclared)
    if not reduction.sync_every_steps:  # else replicas' weights differ within a period
        for variable in map(tf_variable, (*inventory.all_weights, *inventory.trainable_variables)):
            second_trace.refuse(assignments, variable, trained)
    for variable, by in inventory.aggregated:
        if by == MEAN and not variable.dtype.is_floating:
            raise UsageError(
                f"{variable_path(variable)}: its aggregation is the mean, and its dtype is {variable.dtype.name}; use "
                "'sum', 'only_first_replica', or make it float32"
            )
        if by == SUM and not all(assignments.only_add(copy.handle) for copy in per_replica.components(variable)):
            raise UsageError(
                f"{described(variable)}: its aggregation is the sum of what replicas "
                "add, and the step assigns it something other than itself plus something; use assign_add (for entries "
                f"of the replica's own examples {_ADD_ENTRIES}), or sum the batch's share by "
                "tf.distribute.get_replica_context().all_reduce('sum', ...) and leave the aggregation out"
            )
        if by == SUM and any(assignments.exchanged(copy.handle) for copy in per_replica.components(variable)):
            raise UsageError(
                f"{described(variable)}: its aggregation is the sum of what replicas add, and the step adds a value "
                f"that it has of all {replicas} already, as by all_reduce or in merge_call: it would be added "
                f"{replicas} times; leave the aggregation out"
            )
