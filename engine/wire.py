"""What travels between a worker and the parameter servers: one tensor a server each way, in 16 bits if asked.
Worker code, but for what `Pull` learns beforehand of the variables."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from engine.optimizer import Optimizer
from engine.variables import server_of, tf_variable


def to_halves(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor's values in `dtype`, float32 or one of 16 bits, as a vector of uint16: one each, or two."""
    return tf.reshape(tf.bitcast(tf.cast(value, dtype), tf.uint16), [-1])


def from_halves(halves: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """float32 values [..., n] of what `to_halves` made of them, along the last axis."""
    if dtype == tf.float32:
        return tf.bitcast(tf.reshape(halves, [*halves.shape[:-1], -1, 2]), tf.float32)
    return tf.cast(tf.bitcast(halves, dtype), tf.float32)


def send(exact: Sequence, rounded: Sequence, shapes: Sequence, server: str, dtype: tf.DType):
    """Takes float32 tensors to a server, which they reach as one: each by itself costs a message.

    Args:
      exact: scalars that travel as they are.
      rounded: tensors that travel in `dtype`.
      shapes: of those: each a `tf.TensorShape`, or an int32 vector that the server has.
      server: a device.
      dtype: float32 or one of 16 bits.

    Returns:
      (exact, rounded), float32, on the server.
    """
    kinds = [tf.float32] * len(exact) + [dtype] * len(rounded)
    shapes = [tf.TensorShape([])] * len(exact) + list(shapes)
    if dtype == tf.float32:
        lanes = [1] * len(kinds)
        parts = [tf.reshape(tensor, [-1]) for tensor in (*exact, *rounded)]
    else:
        lanes = [kind.size // 2 for kind in kinds]
        parts = [to_halves(tensor, kind) for tensor, kind in zip((*exact, *rounded), kinds, strict=True)]
    flat = tf.concat(parts, 0)
    with tf.device(server):
        sizes = [n * _num_elements(shape) for n, shape in zip(lanes, shapes, strict=True)]
        parts = tf.split(flat, sizes, num=len(sizes))
        if dtype != tf.float32:
            parts = [from_halves(part, kind) for part, kind in zip(parts, kinds, strict=True)]
        found = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    return found[: len(exact)], found[len(exact) :]


def _num_elements(shape):
    return shape.num_elements() if isinstance(shape, tf.TensorShape) else tf.reduce_prod(shape)


def fetch(rows: tf.Tensor, server: str, dtype: tf.DType) -> tf.Tensor:
    """float32 values that a server has computed, brought here in `dtype`; their gradient is not rounded by it."""
    if dtype == tf.float32:
        return rows

    def travel(rows):
        with tf.device(server):
            small = tf.cast(rows, dtype)
        return tf.cast(small, tf.float32)

    return tf.grad_pass_through(travel)(rows)


class Pull:
    """Reads Keras variables from their servers, all that one server has as one vector, and how far optimizers are.

    Args:
      variables: Keras variables; those that are on no server are left out.
      dtype: what float32 travels as.
      optimizers: the engine's.
    """

    def __init__(self, variables: Sequence[tf.keras.Variable], dtype: tf.DType, optimizers: Sequence[Optimizer] = ()):
        self._groups: dict[tuple[str, tf.DType], list[tf.keras.Variable]] = {}
        for each in variables:
            variable = tf_variable(each)
            if server := server_of(variable):
                self._groups.setdefault((server, variable.dtype), []).append(each)
        self._dtypes = {group: dtype if group[1] == tf.float32 else group[1] for group in self._groups}
        self._optimizers = list(optimizers)

    def progress(self) -> list[tf.Tensor]:
        """How far the optimizers are now, each: `Optimizer.read_progress`."""
        return [optimizer.read_progress() for optimizer in self._optimizers]

    def packs(self) -> list[tf.Tensor]:
        """The variables as they are now: a vector for each server and dtype."""
        packs = []
        for (server, dtype), variables in self._groups.items():
            with tf.device(server):
                reads = [tf.raw_ops.ReadVariableOp(resource=tf_variable(v).handle, dtype=dtype) for v in variables]
                flat = tf.concat([tf.reshape(read, [-1]) for read in reads], 0)
                packs.append(tf.cast(flat, self._dtypes[server, dtype]))
        return packs

    def values(self, packs: Sequence[tf.Tensor], progress: Sequence[tf.Tensor] = ()) -> Values:
        """The variables' values in `packs`, and the optimizers' `progress`, if it was pulled."""
        pairs = []
        for ((_, dtype), variables), pack in zip(self._groups.items(), packs, strict=True):
            parts = tf.split(tf.cast(pack, dtype), [v.shape.num_elements() for v in variables])
            pairs += [(v, tf.reshape(part, v.shape)) for v, part in zip(variables, parts, strict=True)]
        return Values(pairs, dict(zip(map(id, self._optimizers), progress, strict=bool(progress))))


class Values:
    """Values of Keras variables that a step computes with instead of reading each of them; none by default.

    A class of its own, because a list on a `tf.Module` would put the variables into the checkpoint.

    Args:
      pairs: Keras variables with their values.
      progress: of optimizers, by id: what `Optimizer.begin_step` takes.
    """

    def __init__(self, pairs: Sequence[tuple[tf.keras.Variable, tf.Tensor]] = (), progress: dict | None = None):
        self._pairs = pairs
        self._progress = progress or {}

    def progress_of(self, optimizer: Optimizer) -> tf.Tensor | None:
        return self._progress.get(id(optimizer))

    @contextlib.contextmanager
    def in_use(self, variables: Sequence = (), tape: tf.GradientTape | None = None):
        """Within, Keras layers compute with the values. What they assign is assigned in the end.

        Yields:
          What `tape` is to be asked for gradients of: for each of `variables` its value here, or itself.
        """
        if not self._pairs:
            yield variables
            return
        with _Scope(self._pairs) as scope:
            found = {id(variable): value for variable, value in self._pairs}
            sources = [found.get(id(variable), variable) for variable in variables]
            if tape is not None:
                tape.watch([source for source in sources if isinstance(source, tf.Tensor)])
            yield sources
        for variable, value in scope.assigned.values():
            variable.assign(value)


class _Scope(tf.keras.StatelessScope):
    """Keras's way to compute with given values, which keeps what is assigned meanwhile to itself."""

    def __init__(self, pairs):
        super().__init__(pairs, collect_losses=True, initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        super().add_update(update)
        self.assigned[id(update[0])] = update
