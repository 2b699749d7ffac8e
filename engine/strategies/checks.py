"""Checks a traced step for mistakes that would silently train something else, or end in errors of TensorFlow's.

`InnerLoop` calls them as soon as a step is traced, with its graph. What they have to know of the trace is in the steps'
contexts: each replica's batch, the calls of losses and metrics, the options that were applied. What counts, or changes
the batch, is where it happens: `engine.step.diagnosis`, `engine.step.batches.check_weighed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from .. import logging
from ..data.form import fields, text_fields
from ..errors import NotCompilableError, UsageError
from ..internals import graphs
from ..internals.tensorflow import variables_read
from ..internals.variables import not_implemented, tf_variable, variable_path
from ..optimizers import KerasOptimizer
from ..reduction import per_replica
from ..reduction.aggregation import MEAN, SUM, described
from ..state import TrainState
from ..step.context import StepContext, TracedLoss
from ..step.diagnosis import casts_text
from ..step.options import CLIPS, RATE_OPTIONS, RULE_OPTIONS, Applied
from ..step.runner import StepRunner
from ..trainer import Trainer

# The calls that together apply an option. An option of none is noted by its own name.
_APPLIED_BY = {
    **dict.fromkeys(CLIPS, ("Update",)),
    "accumulate_steps": ("compute_gradients",),
    "on_nonfinite=skip": ("Update.apply", "Update.end"),
    "precision=float16": ("compute_gradients", "Gradients.unscaled", "Update.apply", "Update.end"),
    **dict.fromkeys(("reduce_dtype", "sync_every_steps"), ("Reduction.sum",)),
    **dict.fromkeys(("freeze", "reduce_lr", "shard_optimizer"), ("Optimizer.apply",)),
    "recompute": ("recomputed",),
}
_UPDATE_OPTIONS = ("clip_norm", "clip_variable_norm", "clip_value", "accumulate_steps", "on_nonfinite", "precision")
_SUM_OPTIONS = ("reduce_dtype", "sync_every_steps")
_ARGUMENTS = {
    "clip_variable_norm": "clipnorm",
    "clip_value": "clipvalue",
    "weight_decay_exclude": None,
    "ema_warmup": None,
}
_MINIMIZE = 'return crankshaft.minimize(self, batch, self.losses, {"loss": self.optimizer})'
_MAKE = "self.optimizer = crankshaft.make_optimizer(self, variables)"
_BY_SHAPES = {"Rank", "Shape", "ShapeN", "Size"}  # ops whose values are not the examples'
# Ops whose CPU kernels accumulate 16-bit values in 16 bits.
_SUMS = {
    *"Cumsum DepthwiseConv2dNativeBackpropFilter ScatterNd TensorScatterAdd".split(),
    *"SegmentMean SegmentSum SegmentSumV2 UnsortedSegmentSum".split(),
}
_STATEFUL_SAMPLING = (
    "the step samples random numbers that differ in a resumed run, also with a seed (%s); sample by "
    "tf.random.stateless_* with step_context().seed(), or by Keras's layers"
)
_MADE_IN_A_STEP = (
    "{}: its step makes variables as it is traced ({}), {}; make them in build, after super().build(), as in self.m = "
    "[tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables], or build there the layer or "
    "optimizer that makes them"
)
_STATE_OF_PYTHON = (
    "the step calls Python (%s), and what its functions keep is in no checkpoint: this resumed run goes on with the "
    "weights of the one before, and with the program's new objects, such as an environment; keep their state in "
    "tf.Variables of the trainer"
)
_COMPARED_IN_PARTS = (
    "%s compares examples with one another, and each replica or micro-batch only those of its own part of the global "
    "batch, which is not what one device computes; compare with those of crankshaft.gather(self, values), without "
    "accumulate_steps"
)
_SUMMARY_OF_ONE = (
    "tf.summary in a step writes what one of %d replicas computes, of its own examples; for the whole batch, return a "
    "metric, such as crankshaft.mean of a value for each example, which a run writes with its own"
)
_ADD_ENTRIES = "assign_add(tf.scatter_nd(indices, updates - tf.gather_nd(variable, indices), variable.shape))"
_SUMS_IN_16_BITS = "on CPUs these accumulate 16-bit values in 16 bits, which loses digits: %s; cast to float32 before"


class StepChecks:
    """The checks of a program's step.

    Args:
      state, runner: the trainer's state, and what runs its step; None for a step that is not a trainer's.
      trains: whether it is `Trainer.train_step`.
      replicas: how many have copies of the variables.
      jit: whether XLA compiles it.
      check_assigned: a strategy's own check of what a training step assigns, with its graph and the replicas' contexts;
        None checks that what each replica assigns from its examples is aggregated.

    Attributes:
      second_trace: on which variables a second trace decides.
    """

    def __init__(
        self,
        state: TrainState | None,
        runner: StepRunner | None,
        trains: bool = True,
        replicas: int = 1,
        jit: bool = False,
        check_assigned: Callable[[tf.Graph, Sequence[StepContext]], None] | None = None,
    ):
        self._state, self._runner, self._trains, self._replicas = state, runner, trains, replicas
        self._jit, self._check_assigned = jit, check_assigned
        self.second_trace = SecondTrace()

    def traced(self, trace: Callable[[], tf.types.experimental.ConcreteFunction], replicates_batch: bool = False):
        """Traces a step by calling `trace`, checks it, and returns it.

        Args:
          replicates_batch: whether each replica computes the whole batch, so that what it assigns is the others' too.
        """
        before = _variables(self._state)
        try:
            step = trace()
        except Exception as error:
            self._check_made(before, error)
            if not isinstance(error, UsageError):
                raise
            # A loss's mistake may be why, such as comparing pairs, which has no gradient: that is the error to show.
            if self._runner and self._state:
                check_losses(self._runner.pop_contexts(), type(self._state.trainer).__name__)
            raise
        self._check_made(before)
        self._check(step.graph, replicates_batch)
        if self.second_trace.is_needed:
            # Of this trace nothing is run: it only shows which of the constants change with the batch's size.
            with self.second_trace.deciding():
                self._check(trace().graph)
        if self._jit:
            check_compilable(step.graph)
        warn_of_step(
            step.graph, self._replicas, is_resumed=bool(self._trains and self._state and self._state.is_resumed)
        )
        return step

    def _check_made(self, before: Mapping[int, tf.Variable], error: Exception | None = None) -> None:
        """Raises UsageError for variables that the trace has made, which a resumed run would lack, or logs a line.

        Args:
          before: the variables before the trace.
          error: the trace's; replicas can't make variables in a step, which is why.
        """
        state, made = self._state, [v for key, v in _variables(self._state).items() if key not in before]
        if state is None or not made or (error is not None and self._replicas == 1):
            return
        names = ", ".join(f"{variable_path(v)} {v.shape.as_list()}" for v in made[:3]) + (", ..." if made[3:] else "")
        refused = self._replicas > 1 or state.is_saved
        why = "which replicas can't" if self._replicas > 1 else "which a resumed run would not have to restore"
        line = _MADE_IN_A_STEP.format(type(state.trainer).__name__, names, why)
        if refused:
            raise UsageError(line) from error
        logging.warning_once("%s", line)

    def _check(self, graph: tf.Graph, replicates_batch: bool = False) -> None:
        if self._runner is None or self._state is None:
            return
        state = self._state
        contexts = [context for context in self._runner.pop_contexts() if context.graph is graph]
        state.trainer.inventory.captured.note_trace(lambda: graphs.dimensions(graph), len(contexts))
        options, shards = state.trainer.run_context.options, self._replicas // contexts[0].mesh.model.size
        has_parts = max(shards, options.micro_batches) > 1 and not replicates_batch
        warns = has_parts and "gather" not in self._runner.applied.names
        check_losses(contexts, type(state.trainer).__name__, warns)
        if not self._trains:
            check_written(state, graph)
            return
        check_options(self._runner.applied, state.trainer, graph, contexts[0].mesh.shard_optimizer)
        check_saved(state, graph)
        if self._check_assigned is not None:
            self._check_assigned(graph, contexts)
        elif self._replicas > 1 and not replicates_batch:
            check_aggregated(state, graph, [context.batch for context in contexts], self._replicas, self.second_trace)


# -- The run's options ------------------------------------------------------------------------------------------------


def check_options(applied: Applied, trainer: Any, graph: tf.Graph, has_sharded_optimizer: bool = False) -> None:
    """Raises UsageError for options that are set and that the step never applies: without it they would do nothing.

    Args:
      trainer: prepared; its step was traced in `graph`.
    """
    # No call of a step applies it: layers have it from the policy under which they were made, as the graph shows.
    precision = trainer.run_context.options.precision
    if precision != "float32" and graphs.has(graph, precision):
        applied.mark("precision")
    sharded = {"shard_optimizer": True} if has_sharded_optimizer else {}
    wanted = {**trainer.run_context.options.changed, **trainer.reduction.changed, **sharded}
    inventory = trainer.inventory
    if not (inventory.all_weights or inventory.trainable_variables):  # then there is no update, as in Keras
        wanted = {name: value for name, value in wanted.items() if name not in _UPDATE_OPTIONS}
    # Keras's optimizers among the attributes are applied by the step itself, so that no update of theirs is noted.
    ids = [*applied.optimizers, *map(id, inventory.keras_optimizers)]
    names = applied.names.union(*(inventory.applied_options.get(optimizer_id, ()) for optimizer_id in ids))
    missing = []
    for name, value in wanted.items():
        calls = _APPLIED_BY.get(name) or _APPLIED_BY.get(f"{name}={value}", (name,))
        if not names.issuperset(calls):
            missing.append(name)
    if not missing:
        return
    has = bool(applied.optimizers), bool(inventory.optimizers)
    causes = {name: _cause(name, wanted[name], *has) for name in missing}
    # One line has one cause and one cure: the first's, with the options that have the same.
    why, fix = causes[missing[0]]
    shown = [*_named_options({name: wanted[name] for name in missing if causes[name] == (why, fix)})]
    have = "has" if len(shown) == 1 else "have"
    owner = type(trainer).__name__
    raise UsageError(f"{' and '.join(shown)} {have} no effect: {owner}{why}; {fix}, or leave the option out")


def _cause(name: str, value: Any, is_updated: bool, has_optimizer: bool) -> tuple[str, str]:
    """Returns why an option is not applied, and the cure; equal for options that go together."""
    if name == "recompute":
        return (
            " calls no layer by crankshaft.engine.layers.recomputed, so nothing would be computed again",
            "call its blocks by that",
        )
    if (name, value) == ("precision", "bfloat16"):
        return " computes nothing in it", "make its layers in build, without a dtype of their own"
    if not is_updated or name in (*_UPDATE_OPTIONS, *_SUM_OPTIONS):
        make = "" if has_optimizer else f", and {_MAKE} in build"
        return (
            ".train_step makes its update without it",
            f"write {_MINIMIZE} in train_step, where losses(batch) returns the metrics{make}",
        )
    if name in RATE_OPTIONS:
        return (
            "'s optimizers have a learning rate of their own",
            "make them with the run's, as in tf.keras.optimizers.Nadam(crankshaft.learning_rate(self))",
        )
    if name in RULE_OPTIONS:
        return "'s optimizers are of its own making", f"write {_MAKE} in build, and no build_optimizer"
    return "'s optimizer was made without it", f"write {_MAKE} in build, or with an optimizer as third argument"


def _named_options(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields options as they were set, named as settings."""
    for name, value in values.items():
        if name in _ARGUMENTS:
            yield f"optimizer_arg={_ARGUMENTS[name] or name}={value}"
        elif isinstance(value, dict):
            yield from (f"{name}={key}={argument}" for key, argument in value.items())
        elif name == "freeze":
            yield from (f"{name}={pattern}" for pattern, _ in value)
        else:
            yield name if value is True else f"{name}={value}"


# -- Losses and metrics -----------------------------------------------------------------------------------------------


def check_losses(contexts: Iterable[StepContext], owner: str, warns_of_parts: bool = False) -> None:
    """Checks what losses and metrics were computed from: text as numbers and pairs of examples give wrong values.

    Args:
      warns_of_parts: whether each computes a part of a batch, so that one that compares examples is another.

    Raises:
      UsageError: a forward pass computes with text, or a loss broadcasts examples [n, 1] with examples [n].
    """
    for loss in (loss for context in contexts for loss in context.losses):
        results = tf.nest.flatten(loss.result, expand_composites=True)
        # None if a loss returned numbers alone, or was executed op by op.
        graph = next(filter(None, (getattr(x, "graph", None) for x in results)), None)
        text = text_fields((fields(loss.batch).features,))
        if text and graph is not None and casts_text(graph):
            raise UsageError(
                f"{', '.join(text)} holds strings, and {owner} computes with them as with numbers; look them up "
                "before, by tf.keras.layers.StringLookup, Hashing or TextVectorization"
            )
        _check_pairs(loss, graph, warns_of_parts)


def _compares(op: tf.Operation, inputs: Sequence[tf.Tensor], columns: Collection[str]) -> bool:
    """Returns whether an operation multiplies matrices of examples, or broadcasts [n, 1, ...] with [1, n, ...]."""
    if op.type in ("MatMul", "BatchMatMulV2"):
        return [x.shape.rank for x in inputs] == [2, 2]
    if op.type == "Einsum":  # of two whose first axes are not the same one
        terms = op.get_attr("equation").split(b"->")[0].split(b",")
        return len(inputs) == len({term.strip()[:1] for term in terms}) == 2
    shapes = [x.shape for x in inputs if (x.shape.rank or 0) > 1]
    return any(x[0] == 1 != x[1] for x in shapes) and any(x[0] != 1 == x[1] for x in shapes)


def _check_pairs(loss: TracedLoss, graph: tf.Graph | None, warns_of_parts: bool) -> None:
    """Checks that no operation of a loss broadcasts examples [n, 1] with examples [n].

    Labels [n] and outputs [n, 1] broadcast to [n, n], whose mean trains something else. Each `tf.function`, branch and
    loop that the loss calls is checked too. An axis that is added on purpose, as by labels[None, :] or scores[:, None],
    is not a mistake, but a loss of a part of the batch is then another, which `warns_of_parts` logs.
    """
    size = tf.nest.flatten(loss.batch)[0].shape[0]
    if graph is None or size == 1:
        return
    tensors = [x for x in tf.nest.flatten((loss.outputs, loss.batch), expand_composites=True) if tf.is_tensor(x)]
    results = [x for x in tf.nest.flatten(loss.result, expand_composites=True) if getattr(x, "graph", None) is graph]
    captured = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    here = [x for x in (captured.get(id(x), x) for x in tensors) if getattr(x, "graph", None) is graph]
    operations = graph.get_operations()
    positions = {op.name: position for position, op in enumerate(operations)}
    first = max((positions[x.op.name] for x in here), default=0)
    last = max(positions[x.op.name] for x in results)
    if _finds(operations[first : last + 1], here, _broadcasts):
        labels = fields(loss.batch).labels
        raise UsageError(
            f"{loss.owner}: values [n, 1] and [n] of n examples broadcast to [n, n], one for each pair of them "
            f"(outputs are {_shape(loss.outputs, size)}, labels {_shape(() if labels is None else labels, size)}); "
            "make the shapes alike, by outputs[:, 0] or labels[:, None], or write labels[None, :] if pairs are meant"
        )
    if warns_of_parts:
        needed = {x.op.name for x in results}  # not a gradient that is made beside another one, and not used
        for op in reversed(operations[: last + 1]):
            needed.update(x.op.name for x in op.inputs if op.name in needed)
        # What replicas have exchanged is not of this part alone. A loop's turns, as those of tf.map_fn, are mostly of
        # single examples.
        of_part = (op for op in operations if op.name in needed and not graphs.exchanges(op))
        if _finds(of_part, here, _compares, enters_loops=False):
            logging.warning_once(_COMPARED_IN_PARTS, loss.owner)


def _broadcasts(op: tf.Operation, inputs: Sequence[tf.Tensor], columns: Collection[str]) -> bool:
    """Returns whether an operation broadcasts [n, 1] with [n], which pairs the examples."""
    sizes = {x.shape[0] for x in inputs if x.name in columns} & {x.shape[0] for x in inputs if x.shape.rank == 1}
    return any(x.shape.rank == 2 and x.shape[0] == x.shape[1] and x.shape[0] in sizes for x in op.outputs)


def _finds(
    operations: Iterable[tf.Operation], tensors: Iterable[tf.Tensor], is_found: Callable[..., bool], enters_loops=True
) -> bool:
    """Returns whether an operation is found that computes with `tensors`, or with what is computed from them.

    Args:
      is_found: gets an operation, those of its inputs, and the names of all that are [n, 1], as the tensors are.
    """
    examples = {x.name for x in tensors}
    columns = {x.name for x in tensors if _is_column(x)}
    for op in operations:
        inputs = [x for x in op.inputs if x.name in examples]
        if not inputs or op.type in _BY_SHAPES:
            continue
        if is_found(op, inputs, columns):
            return True
        for called in graphs.all_called(op) if enters_loops or not op.type.endswith("While") else ():
            # From the last on, since a branch does not take the condition, the first input.
            arguments = zip(reversed(op.inputs), reversed(called.inputs), strict=False)
            inner_tensors = [inner for outer, inner in arguments if outer.name in examples]
            if _finds(called.get_operations(), inner_tensors, is_found, enters_loops):
                return True
        of_examples = (x for x in op.outputs if any(source.name in examples for source in graphs.value_inputs(x)))
        examples.update([x.name for x in of_examples])
        if any(x.name in columns for x in inputs):
            columns.update(x.name for x in op.outputs if _is_column(x))
    return False


def _is_column(x: tf.Tensor) -> bool:
    return x.shape.rank == 2 and x.shape[1] == 1


def _shape(nest: Any, size: int | None) -> Any:
    """Returns the shape of each tensor of a nest, with n for the examples."""

    def named(x: Any) -> str:
        return f"[{', '.join('n' if axis == size else str(axis) for axis in x.shape)}]"

    shapes = tf.nest.map_structure(named, nest)
    return shapes if isinstance(shapes, str) else str(shapes).replace("'", "")


# -- Variables --------------------------------------------------------------------------------------------------------


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


def _variables(state: TrainState | None) -> dict[int, tf.Variable]:
    """The variables of a run's checkpoints, by `id`."""
    return {id(variable): variable for variable in state.variables()} if state else {}


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


# -- What TensorFlow and XLA make of it -------------------------------------------------------------------------------


def check_compilable(graph: tf.Graph) -> None:
    """Raises NotCompilableError for an op that XLA lacks, before XLA prints pages."""
    if op := graphs.lacked_by_xla(graph):
        where = f", at {line}" if (line := graphs.program_line(op)) else ""
        fix = "give the loop maximum_iterations, or use" if op.type == "EmptyTensorList" else "use"
        raise NotCompilableError(f"XLA can't compile {op.type}{where}; {fix} jit=auto or off")


def warn_of_step(graph: tf.Graph, replicas: int, is_resumed: bool = False) -> None:
    """Warns of what a step that was traced in a graph does not do as it may seem to.

    It samples numbers that no resumed run repeats, calls Python's objects, which are new in a resumed run, adds up
    16-bit values in 16 bits, or writes one replica's summary.
    """
    halves, ops = (tf.bfloat16, tf.float16), [*graphs.operations(graph)]
    if is_resumed and (calls := [op for op in ops if op.type in ("PyFunc", "EagerPyFunc")]):
        logging.warning_once(_STATE_OF_PYTHON, graphs.program_line(calls[0]) or calls[0].name)
    if sampled := {op.type for op in ops if graphs.samples(op)}:
        logging.warning_once(_STATEFUL_SAMPLING, ", ".join(sorted(sampled)))
    if inexact := [op.name for op in ops if op.type in _SUMS and op.outputs[0].dtype in halves]:
        logging.warning_once(_SUMS_IN_16_BITS, ", ".join(inexact[:5]))
    if replicas > 1 and any(op.type.startswith("Write") and op.type.endswith("Summary") for op in ops):
        logging.warning_once(_SUMMARY_OF_ONE, replicas)
