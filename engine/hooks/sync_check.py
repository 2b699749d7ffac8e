"""Checks periodically that replicas hold the same values, and names one that does not, before it spoils a run.

Host code around replica code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import tensorflow as tf

from ..internals.variables import path_of, read_local
from ..mesh.cuts import cut_of
from ..reduction import per_replica
from . import Periodic, Status

_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by bytes


class OutOfSyncError(Exception):
    """Replicas hold different values of a variable. One line: which replica, which variable, what to do."""


class SyncCheck(Periodic):
    """Compares a checksum of every variable over all replicas, and raises `OutOfSyncError` where one differs.

    A variable that is cut over a mesh is compared between the replicas that hold the same part. Variables that are
    meant to differ are left out: those of `engine.reduction.per_replica`, and a process's place in its data. The
    checksum is the sum of the values' bits as integers, modulo 2**64: it finds a single value that has changed in any
    bit, not values that were swapped.

    Args:
      every_steps: the period; 0 is never.
      replica_names: what the message calls each replica; None numbers them.
    """

    name = "sync_check"

    def __init__(self, every_steps: int, replica_names: Sequence[str] | None = None):
        super().__init__(every_steps)
        self._replica_names = replica_names
        self._variables: list[tf.Variable] = []
        self._sums: Callable | None = None

    def begin(self, status: Status) -> None:
        distribution = status.strategy.distribution
        hosts = {id(variable) for variable in status.state.input.variables}
        compared = (variable for variable in status.state.variables() if id(variable) not in hosts)
        self._variables = [variable for variable in compared if not per_replica.differs(variable)]

        def checksums():
            sums = tf.stack([_checksum(variable) for variable in self._variables])
            return status.strategy.mesh.everyone.all_gather(sums)

        def on_all():
            return distribution.experimental_local_results(distribution.run(checksums))[0]

        self._sums = tf.function(on_all, autograph=False)

    def act(self, status: Status) -> None:
        sums = self._sums().numpy()
        for variable, column in zip(self._variables, sums.T.tolist(), strict=True):
            for alike in _holders(variable, len(column)):
                self._check(status.step, variable, {replica: column[replica] for replica in alike})

    def _check(self, step: int, variable: tf.Variable, sums: dict[int, int]) -> None:
        """Raises `OutOfSyncError` where checksums, by replica, differ."""
        ((most, _),) = Counter(sums.values()).most_common(1)  # of two alike the first
        if odd := [self._called(replica) for replica, value in sums.items() if value != most]:
            raise OutOfSyncError(
                f"step {step}: {', '.join(odd)} of {len(sums)} replicas holds other values of "
                f"{path_of(variable)} {variable.shape.as_list()} than the rest; look for code that "
                "changes it on one replica only, or for a faulty device, and start again from the last checkpoint"
            )

    def _called(self, replica: int) -> str:
        return (
            f"replica {replica}"
            if self._replica_names is None
            else f"replica {replica} ({self._replica_names[replica]})"
        )


def _holders(variable: tf.Variable, replicas: int) -> list[list[int]]:
    """Returns the replicas that hold the same of a variable, a list for each part of it."""
    cut, replicas_of = cut_of(variable), defaultdict(list)
    for replica in range(replicas):
        replicas_of[cut.box(replica) if cut else None].append(replica)
    return list(replicas_of.values())


def _checksum(variable: tf.Variable) -> tf.Tensor:
    """Returns the checksum of this replica's copy, scalar int64. Replica code."""
    value = read_local(variable)
    bits = tf.cast(value, tf.uint8) if value.dtype == tf.bool else tf.bitcast(value, _BITS[value.dtype.size])
    return tf.reduce_sum(tf.cast(bits, tf.int64))
