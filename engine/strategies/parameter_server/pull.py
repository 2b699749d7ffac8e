"""Pulls variables from their servers, one tensor from each server instead of one for each variable.

Worker code, except for what `Pull` finds out beforehand about the variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...internals.variables import server_of, tf_variable
from ...optimizers.base import Optimizer
from ...reduction import wire
from ...step.context import Values

PROGRESS = tf.TensorShape([2, 2])  # of an optimizer, two float64 as float32 lanes


class Pull:
    """Reads Keras variables and the optimizers' progress from their servers.

    All that a server has travels as one vector, or as a few where one message can't hold it (`wire.Packs`).

    Args:
      variables: Keras variables; those that are on no server are left out.
      reduce_dtype: what float32 travels as.
      optimizers: the engine's.
      pack_bytes: see `wire.Packs`.
    """

    def __init__(
        self,
        variables: Sequence[tf.keras.Variable],
        reduce_dtype: tf.DType,
        optimizers: Sequence[Optimizer] = (),
        pack_bytes: int = 0,
    ):
        self._reduce_dtype = reduce_dtype
        self._groups: dict[tuple[str, tf.DType], list[tf.keras.Variable]] = {}
        self._progressing: dict[tuple[str, tf.DType], list[Optimizer]] = {}
        for each in variables:
            variable = tf_variable(each)
            if server := server_of(variable):
                self._groups.setdefault((server, variable.dtype), []).append(each)
        for optimizer in optimizers:
            group = server_of(optimizer.iterations), tf.float32
            self._groups.setdefault(group, [])
            self._progressing.setdefault(group, []).append(optimizer)
        self._layouts = {group: self._layout(group, pack_bytes) for group in self._groups}

    def _layout(self, group: tuple[str, tf.DType], pack_bytes: int) -> Any:
        shapes = [tf.TensorShape(variable.shape) for variable in self._groups[group]]
        if group[1] == tf.float32:
            return wire.Layout(
                [PROGRESS] * len(self._progressing.get(group, ())), shapes, self._reduce_dtype, pack_bytes
            )
        return wire.Packs(shapes, [1] * len(shapes), group[1], pack_bytes)

    def packs(self) -> list[tf.Tensor]:
        """Reads the variables as they are now: vectors for each server and dtype, with the progress of it."""
        packs: list[tf.Tensor] = []
        for group, variables in self._groups.items():
            server, dtype = group
            with tf.device(server):
                reads = [tf.raw_ops.ReadVariableOp(resource=tf_variable(v).handle, dtype=dtype) for v in variables]
                if dtype == tf.float32:
                    progress = [tf.bitcast(each.read_progress(), dtype) for each in self._progressing.get(group, ())]
                    packs += self._layouts[group].pack(progress, reads)
                else:
                    packs += self._layouts[group].join([tf.reshape(read, [-1]) for read in reads])
        return packs

    def values(self, packs: Sequence[tf.Tensor]) -> Values:
        """Returns the variables' values in `packs`, and the optimizers' progress."""
        pairs: list[tuple] = []
        known: dict[int, tf.Tensor] = {}
        packs = list(packs)
        for group, variables in self._groups.items():
            layout = self._layouts[group]
            here, packs = packs[: layout.num_packs], packs[layout.num_packs :]
            if group[1] == tf.float32:
                progress_lanes, parts = layout.unpack(here)
                lanes_of = zip(self._progressing.get(group, ()), progress_lanes, strict=True)
                known |= {id(one): tf.bitcast(lanes, tf.float64) for one, lanes in lanes_of}
            else:
                parts = [tf.reshape(part, v.shape) for part, v in zip(layout.split(here), variables, strict=True)]
            pairs += zip(variables, parts, strict=True)
        return Values(pairs, known)
