"""Handles non-finite numbers: stops before they are saved, and reports their origin."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf

from .. import logging
from ..errors import LabelError, NonfiniteError
from ..internals.variables import CompiledReader, own_copy, tf_variable, variable_path
from ..mesh.sharded import variable_sharding
from ..metrics.means import is_loss
from ..metrics.pairs import Pair
from ..metrics.sums import LoopSums
from ..own_code import users_line_in
from ..reduction import per_replica
from ..step.options import StepOptions
from .base import Hook, Status

_PIECE_BYTES = 64 << 20


def check_labels(pairs: Mapping[str, Pair], title: str) -> None:
    """Raises `LabelError`, which begins with `title`, if a metric had labels that it does not accept."""
    for name, pair in pairs.items():
        if isinstance(pair, Pair) and (mistake := pair.mistake()):
            raise LabelError(f"{title}: {name}: {mistake}")


def explain(error: Exception) -> str | None:
    """Explains an error of `check_numerics`: the op, its output, shape, and the user's line that created it. Else None.

    https://www.tensorflow.org/api_docs/python/tf/debugging/enable_check_numerics
    """
    text = str(error)
    match = re.search(r"Detected Infinity or NaN in output (\d+) of (?:graph|eagerly-executing) op \"([^\"]+)\"", text)
    if not match:
        return None
    output, op = match.groups()
    values = re.search(r"Tensor had ([^\n\[]*?) values", text)
    shape = re.search(r"^\s*shape: (.*)$", text, re.MULTILINE)
    node = re.search(r"Detected at node (\S+?)(?:/CheckNumericsV2\S*)? defined at", text)
    kind = values.group(1).replace("NaN", "nan").replace("Inf", "inf") if values else "inf or nan"
    line = f"{kind} first in output {output} of op {op}"
    if node and node.group(1) != op:
        line += f" ({node.group(1)})"
    if shape:
        line += f", shape {shape.group(1).strip()}"
    if users_line := users_line_in(text):
        line += f", made at {users_line}"
    return line + "; look at that op's inputs, lower the learning rate or set clip_norm"


def check_weights(trainer, title: str, processes=None) -> None:
    """Raises `NonfiniteError`, which begins with `title`, if a weight or a moving statistic is not finite.

    The loss may still be finite, since on some CPUs ReLU maps NaN to 0. Waits for the devices.

    Args:
      processes: all that make this call (`engine.strategies.base.Processes`), and raise together; None is this one.
    """
    path = _nonfinite_weight(trainer)
    _check_paths(trainer, title, processes.exchange(path) if processes else [path])


def _nonfinite_weight(trainer, are_finite: Callable[[list], tf.Tensor] | None = None) -> str:
    """Returns the path of the first weight or moving statistic in this process that is not finite, or ""."""
    inventory = trainer.inventory
    return first_nonfinite([*inventory.all_weights, *inventory.moving_statistics], are_finite) or ""


def _check_paths(trainer, title: str, paths: Iterable[str]) -> None:
    """Raises `NonfiniteError`, see `check_weights`, by the `_nonfinite_weight` of all processes."""
    if path := next(filter(None, paths), None):
        raise NonfiniteError(f"{title}: variable {path} is not finite; {_fix(trainer.run_context.options)}")


def first_nonfinite(variables: Iterable, are_finite: Callable[[list], tf.Tensor] | None = None) -> str | None:
    """Returns the path of the first float variable with an inf or NaN, or None."""
    floating = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    finite = (are_finite or _are_finite)(floating).numpy() if floating else ()
    return next(
        (variable_path(variable) for variable, is_finite in zip(floating, finite, strict=True) if not is_finite), None
    )


def _are_finite(variables: list) -> tf.Tensor:
    """Returns whether each variable is finite, [variables] bool, on the host."""
    checks = [_all_finite(tf_variable(variable)) for variable in variables]  # all are started before waiting for one
    with tf.device("CPU:0"):
        return tf.stack([tf.reduce_all(tf.stack(check)) for check in checks])


def _all_finite(variable: tf.Variable) -> list[tf.Tensor]:
    """Returns whether each piece is finite, on its device: the first of copies, each of the shards in this process."""
    checks = []
    for component in per_replica.components(variable) if variable_sharding(variable) else [own_copy(variable)]:
        with tf.device(component.device):
            checks += [tf.reduce_all(tf.math.is_finite(piece)) for piece in _pieces(component)]
    return checks


def _pieces(variable: tf.Variable) -> Iterable[tf.Tensor]:
    """Yields a variable's value, or a large table's rows in pieces: a read would copy it."""
    row_bytes = 4 * math.prod(variable.shape[1:])
    if row_bytes * math.prod(variable.shape[:1]) <= _PIECE_BYTES:
        yield tf.convert_to_tensor(variable)
        return
    rows = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, variable.shape[0], rows):
        yield variable.sparse_read(tf.range(first, min(first + rows, variable.shape[0])))


class NanGuard(Hook):
    """Stops a run whose loss or gradients are not finite, so that no checkpoint has such a state.

    Reads the sums of the *previous* call, which has completed, so it never waits for a device between two calls of the
    inner loop; before a checkpoint and at the end it reads the rest, and checks the weights, as each evaluation does.

    If steps are skipped (`on_nonfinite="skip"`, or a loss scale), losses need not be finite: it counts these steps,
    warns, and ends the run after `max_skipped` successive ones.

    Args:
      ends: whether such a loss is an error; False if a Keras callback ends the run.
      max_skipped: number of successive steps without an update that is an error.
      warn_seconds: minimum time between warnings.
    """

    name = "nan_guard"

    def __init__(self, ends: bool = True, *, max_skipped: int = 100, warn_seconds: float = 10.0, clock=time.monotonic):
        self._ends = ends
        self.max_skipped = max_skipped
        self.skipped = 0  # total number of skipped steps
        self.skipped_in_a_row = 0
        self._warn_seconds = warn_seconds
        self._clock = clock
        self._warned_at = -math.inf
        self._unchecked: tuple[int, int, LoopSums] | None = None  # first step, last step, their sums
        self._are_finite = CompiledReader(_are_finite, at_second_call=True)

    def __call__(self, status: Status) -> None:
        before = self._unchecked
        sums = status.segment.sums
        self._unchecked = None if sums is None else (status.segment.first_step + 1, status.step, sums)
        if before is not None:
            self._check(status, *before)

    def rewind(self, status: Status) -> None:
        self._unchecked = None

    def before_save(self, status: Status) -> str | None:
        if self._unchecked is not None:
            unchecked, self._unchecked = self._unchecked, None
            self._check(status, *unchecked)
        return _nonfinite_weight(status.state.trainer, self._are_finite) if self._ends else None

    def check_together(self, status: Status, values: list[str]) -> None:
        _check_paths(status.state.trainer, f"step {status.step}", values)

    def end(self, status: Status) -> None:
        if (path := self.before_save(status)) is not None:
            self.check_together(status, status.strategy.exchange(path))

    def _check(self, status: Status, first: int, last: int, sums: LoopSums) -> None:
        options = status.state.trainer.run_context.options
        totals = sums.read()
        # Before the losses: a label that a loss does not take makes it nan, and is what to name.
        check_labels(totals, _steps(first, last))
        skipped, counted = totals.get("skipped", (0.0, 0.0))  # each replica counts every step
        if counted:
            self._count_skipped(first, last, round(skipped / counted * (last - first + 1)), options)
        if options.on_nonfinite == "skip" or not self._ends:
            return
        for name, (means_totals, _) in sorted(totals.items()):
            total = float(np.sum(means_totals))  # a loss may be of several means
            # With a dynamic loss scale, the gradients' norm has only applied steps.
            if math.isfinite(total) or not (name == "gradient_norm" or is_loss(name)):
                continue
            layers = status.state.trainer.inventory.layers.values()
            layer_variables = [variable for layer in layers for variable in layer.variables]
            path = first_nonfinite([*layer_variables, *status.state.variables()])  # layers' before slots
            which = f"the first such variable is {path}" if path else "all variables are finite"
            value = "nan" if math.isnan(total) else "inf"
            raise NonfiniteError(f"{_steps(first, last)}: {name} is {value}, {which}; {_fix(options)}")

    def _count_skipped(self, first: int, last: int, skipped: int, options: StepOptions) -> None:
        # Sums show how many steps of a call were skipped, not which: a call with one good step resets the count.
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped == last - first + 1 else 0
        if self.skipped_in_a_row >= self.max_skipped:
            raise NonfiniteError(
                f"step {last}: the gradients of the last {self.skipped_in_a_row} steps were not finite, so nothing is "
                f"learned; {_fix(options)}"
            )
        if skipped and self._clock() - self._warned_at >= self._warn_seconds:
            self._warned_at = self._clock()
            logging.warning(
                "%s: %d updates left out, their gradients were not finite (%d so far)",
                _steps(first, last),
                skipped,
                self.skipped,
            )

    def host_state(self) -> dict:
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def restore_host_state(self, values: dict) -> None:
        self.skipped = values.get("skipped", 0)
        self.skipped_in_a_row = values.get("skipped_in_a_row", 0)


def _fix(options: StepOptions) -> str:
    """What to change after non-finite numbers, in an error's words; not what these options do already."""
    fixes = {
        "lower the learning rate": True,
        "use precision=bfloat16, which has the range of float32": options.precision == "float16",
        "set clip_norm": not options.clip_norm,
        "leave such updates out with on_nonfinite=skip": not options.may_skip,
        "name the op with check_numerics": not options.check_numerics,
    }
    chosen = ", ".join(fix for fix, is_of_use in fixes.items() if is_of_use)
    return f"{chosen}, or look in the data for nan and for labels out of range"


def _steps(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"steps {first} to {last}"
