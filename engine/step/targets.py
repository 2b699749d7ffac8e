"""Variables as optimizers see them: a name in checkpoints, this replica's value, or the piece of it that it updates."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from ..internals.tensorflow import temporary_variable
from ..internals.variables import assign_local, path_of, read_local, tf_variable
from ..mesh import pieces
from ..mesh.cuts import Cut, cut_of
from ..mesh.mesh import current_mesh


class Target:
    """A variable to update: its name in checkpoints, and its value on this replica. Made in the strategy's scope."""

    def __init__(self, variable, position, multiplier=1.0):
        self.given = variable
        self.multiplier = multiplier
        self.variable = tf_variable(variable)
        self.path = path_of(variable)
        # Keras numbers layers and unnamed variables through the life of a process
        # ("dense_7/kernel", "variable_12"): only the last part without its number is the same in
        # the process that restores.
        leaf = re.sub(r"(:\d+|_\d+)+$", "", self.path.split("/")[-1])
        self.key = f"{position:04d}_{leaf}"
        self.decays = True
        self.piece = pieces.piece_of(self.variable, current_mesh())

    @property
    def slot_cut(self) -> Cut | None:
        """How its slots are cut over the mesh; None where each replica has them whole."""
        return self.piece.cut if self.piece else cut_of(self.variable)

    @property
    def slot_shape(self) -> Sequence[int]:
        """What each replica has of a slot."""
        return self.piece.cut.local_shape if self.piece else self.variable.shape

    @property
    def handle(self):
        return self.variable.handle

    def rate(self, learning_rate):
        """Returns the variable's share of the learning rate or decay of all variables."""
        return learning_rate if self.multiplier == 1 else learning_rate * self.multiplier

    def read(self):
        """Reads this replica's value, a tensor."""
        return read_local(self.variable)

    def gather(self, indices):
        """Gathers this replica's rows `indices`."""
        return tf.raw_ops.ResourceGather(resource=self.handle, indices=indices, dtype=self.variable.dtype)

    def constrain(self):
        """Applies a Keras variable's constraint, if it has one, to this replica's value."""
        constraint = getattr(self.given, "constraint", None)
        if constraint is not None:
            assign_local(self.variable, constraint(self.read()))


class OpenPiece(Target):
    """The piece of a target that this replica updates, while it does. Replica code.

    The kernels update a variable of its own, which is gone with the update. `close` ends it.
    """

    def __init__(self, target: Target):
        vars(self).update(vars(target))
        self.whole = target
        self.variable = temporary_variable(self.piece.own(target.read()))

    @classmethod
    def of(cls, gradient, target: Target) -> tuple[tf.Tensor, OpenPiece]:
        """Opens a target's piece, and returns it behind its gradient; of a whole one it takes the piece's."""
        gradient = tf.convert_to_tensor(gradient)
        if gradient.shape == target.variable.shape:
            gradient = target.piece.own(gradient)
        return gradient, cls(target)


def close(opened: Sequence[OpenPiece]) -> None:
    """Gathers the values of variables of which each replica has updated its piece. Replica code."""
    wholes = pieces.gather((target.piece, target.read()) for target in opened)
    for target, value in zip(opened, wholes, strict=True):
        assign_local(target.whole.variable, value)


class Targets:
    """Targets in order, found by variable.

    A separate class, because a list or dictionary on a tf.Module would put the model's variables into the checkpoint a
    second time.
    """

    def __init__(self, owner, variables, multipliers):
        self._owner = owner
        targets = [Target(*each) for each in zip(variables, range(len(variables)), multipliers, strict=True)]
        self._by_id = {id(target.variable): target for target in targets}

    @property
    def variables(self):
        """All variables, frozen ones too, in order."""
        return [target.variable for target in self._by_id.values()]

    def __iter__(self):
        """Yields the targets that are updated: all but the frozen ones."""
        return (target for target in self._by_id.values() if target.multiplier)

    def __getitem__(self, variable):
        try:
            return self._by_id[id(tf_variable(variable))]
        except KeyError:
            raise ValueError(
                f"optimizer {self._owner} was built without variable {path_of(variable)}; pass every variable to build"
            ) from None
