"""Checks that replicas have the same values, and names one that differs, before it spoils a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from ..errors import OutOfSyncError
from ..internals.variables import CompiledReader, variable_path
from ..mesh.sharded import variable_sharding
from ..reduction import per_replica
from .base import Period, Periodic, Status


class SyncCheck(Periodic):
    """Compares a hash of every variable across replicas, and raises `OutOfSyncError` if one differs.

    After the first call, before each checkpoint and at the run's end, so that no result comes from replicas that
    differ, and periodically. A variable sharded over a mesh is compared between the replicas with the same shard.
    Variables that may differ are excluded: those that synchronize when read, such as the optimizer state of local SGD,
    and a process's position in its data.

    Args:
      every_steps: the period; 0 disables it.
      replica_names: the replicas' names in messages; None numbers them.
      user_periods: other periods, at whose ends several processes also compare if a user's code runs in any.
      runs_users: whether a user's code runs in this process, which may set variables only here.
    """

    name = "sync_check"
    ends_last = True  # Keras callbacks may set weights as they end

    def __init__(
        self,
        every_steps: int,
        replica_names: Sequence[str] | None = None,
        user_periods: Collection[int | Period] = (),
        runs_users: bool = False,
    ):
        super().__init__(every_steps)
        self._replica_names = replica_names
        self._user_periods, self._runs_users = user_periods, runs_users
        self._is_first = True
        self._variables: list[tf.Variable] = []
        self._hashes: CompiledReader

    def begin(self, status: Status) -> None:
        if status.strategy.num_hosts > 1 and any(status.strategy.exchange(self._runs_users)):
            self.more = self._user_periods
        positions = {id(variable) for variable in status.state.input.variables}
        self._variables = [
            variable
            for variable in status.state.variables()
            if variable.synchronization != tf.VariableSynchronization.ON_READ
            and variable.dtype != tf.string  # hooks' state of this process (`TrainState.hook_state`)
            and id(variable) not in positions
        ]
        replicas = status.strategy.num_replicas // status.strategy.num_hosts
        self._hashes = CompiledReader(lambda variables: hashes(variables, replicas))

    def is_due(self, status: Status) -> bool:
        return super().is_due(status) or (self._is_first and status.strategy.in_step)

    def act(self, status: Status) -> None:
        self._is_first = False
        self.check_together(status, status.strategy.exchange(self.before_save(status)))

    def before_save(self, status: Status) -> str:
        # As text: processes exchange JSON, which has no bytes.
        return self._hashes(self._variables).numpy().tobytes().hex()

    def check_together(self, status: Status, values: list[str]) -> None:
        arrays = [np.frombuffer(bytes.fromhex(value), np.int64).reshape(len(self._variables), -1) for value in values]
        by_replica = np.concatenate(arrays, axis=1)
        for variable, checksums in zip(self._variables, by_replica.tolist(), strict=True):
            for holders in _holders(variable, len(checksums)):
                self._check(status.step, variable, {replica: checksums[replica] for replica in holders})

    def end(self, status: Status) -> None:
        self.act(status)

    def _check(self, step: int, variable: tf.Variable, checksums: dict[int, int]) -> None:
        """Raises `OutOfSyncError` if hashes, by replica, differ."""
        ((most, _),) = Counter(checksums.values()).most_common(1)  # the first, if two are equally frequent
        if odd := [self._called(replica) for replica, value in checksums.items() if value != most]:
            raise OutOfSyncError(
                f"step {step}: {', '.join(odd)} of {len(checksums)} replicas holds other values of "
                f"{variable_path(variable)} {variable.shape.as_list()} than the rest; look for a callback, hook or "
                "program that sets it to other values on one process, for a step that changes it by each replica's own "
                "examples or random numbers without an aggregation, a sum across replicas, reduction.sum(averages=) or "
                "seed(common=True), or for a faulty device, and start again from the last checkpoint"
            )

    def _called(self, replica: int) -> str:
        name = "" if self._replica_names is None else f" ({self._replica_names[replica]})"
        return f"replica {replica}{name}"


def hashes(variables: Sequence[tf.Variable], replicas: int = 1) -> tf.Tensor:
    """Returns a 64-bit hash of each variable on each replica of this process, int64 [variables, replicas]."""
    checksums = []
    with tf.device("CPU:0"):
        for variable in variables:  # a plain variable is shared by all replicas
            values = [tf.reshape(component.read_value(), [1, -1]) for component in per_replica.components(variable)]
            copies = [tf.raw_ops.Fingerprint(data=value, method="farmhash64") for value in values]
            checksums.append(tf.broadcast_to(tf.bitcast(tf.concat(copies, 0), tf.int64), [replicas]))
        return tf.stack(checksums) if checksums else tf.zeros([0, replicas], tf.int64)


def _holders(variable: tf.Variable, replicas: int) -> list[list[int]]:
    """Returns the replicas with the same values of a variable, a list per shard."""
    sharding, replicas_of = variable_sharding(variable), defaultdict(list)
    for replica in range(replicas):
        replicas_of[sharding.box(replica) if sharding else None].append(replica)
    return list(replicas_of.values())
