"""Calls `Trainer.compute_metrics` at the chief, and gives all workers its metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError, reason
from .predictions import Predictions

_CHANNELS = (1, 3, 4)


class Computed(NamedTuple):
    """The results of `Trainer.compute_metrics` by name.

    Attributes:
      metrics: numbers; the same in all training processes.
      texts: texts for TensorBoard, at the chief.
      images: images for TensorBoard, at the chief, [n, height, width, channels].
    """

    metrics: Mapping[str, float] = {}
    texts: Mapping[str, str] = {}
    images: Mapping[str, np.ndarray] = {}


def compute(trainer: Any, strategy: Any, predictions: Callable[[], Predictions], taken: Collection[str]) -> Computed:
    """Computes a trainer's metrics of predictions, at the chief. All training processes have to call it.

    Args:
      predictions: returns them; called at the chief alone.
      taken: the names of the evaluation's other metrics.

    Raises:
      UsageError: its result is not as described there; on workers other than the chief, also if it raised an error,
        which the chief raises unchanged.
    """
    owner = f"{type(trainer).__name__}.compute_metrics"
    computed, failure = Computed(), None
    if strategy.is_chief:
        try:
            computed = _by_kind(owner, trainer.compute_metrics(predictions()), taken)
        except Exception as error:
            if strategy.num_hosts == 1:
                raise
            failure = error  # raised only after the exchange, in which the others wait
    if strategy.num_hosts == 1:
        return computed
    line = failure and f"{type(failure).__name__}: {reason(failure)}"
    chief = strategy.exchange([line, computed.metrics])[0]
    if failure:
        raise failure
    if chief[0]:
        raise UsageError(f"{owner} has failed at {strategy.host_names[0]}: {chief[0]}")
    return computed._replace(metrics=chief[1])


def _by_kind(owner: str, values: Any, taken: Collection[str]) -> Computed:
    if not isinstance(values, dict):
        raise UsageError(f'{owner} returned a {type(values).__name__}; return numbers by name, {{"ndcg": 0.5}}')
    metrics: dict[str, float] = {}
    texts: dict[str, str] = {}
    images: dict[str, np.ndarray] = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.empty([], object)
        is_number = array.dtype.kind in "biuf"
        if not (isinstance(name, str) and name) or name in taken:
            raise UsageError(f"{owner} returned {name!r}, which is {'another metric' if name in taken else 'no name'}")
        if isinstance(value, str):
            texts[name] = value
        elif is_number and not array.ndim:
            metrics[name] = float(array)
        elif is_number and array.ndim in (3, 4) and array.shape[-1] in _CHANNELS and array.size:
            images[name] = array if array.ndim == 4 else array[np.newaxis]
        else:
            kind = f"{array.dtype.name}{[*array.shape]}" if array.ndim else type(value).__name__
            raise UsageError(
                f"{owner} returned {kind} as {name!r}; return a number, a str, or images [height, width, channels] or "
                f"[n, height, width, channels] of {', '.join(map(str, _CHANNELS))} channels"
            )
    return Computed(metrics, texts, images)
