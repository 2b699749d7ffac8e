"""The metric that a run monitors, and its better direction. Pure Python, so flags can be checked by it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import UsageError

_MINIMIZED = ("_loss", "error", "perplexity", "rmse", "mae", "mse")  # ends of names, besides `loss` itself
_WORDS = {"max": "higher", "min": "lower"}


@dataclasses.dataclass(frozen=True)
class Monitored:
    """A metric to monitor: `eval_NAME` or `train_NAME`, or with its direction `max:eval_NAME` or `min:eval_NAME`.

    Of one of several evaluation sets `eval_SET/NAME`.

    Attributes:
      direction: "max" or "min", the better one; None if not in the spelling.
      source: "eval", of evaluations, or "train", the mean over the steps since the last check.
      metric: its name in evaluations.
    """

    direction: str | None
    source: str
    metric: str

    @classmethod
    def parse(cls, text: str) -> Monitored:
        """Parses a spelling. Raises UsageError for any other."""
        if not (match := re.fullmatch(r"(?:(max|min):)?(eval|train)_(.+)", text, re.DOTALL)):
            raise UsageError(
                f"monitor={text} is unknown; use eval_NAME or train_NAME, such as eval_loss or max:eval_NAME"
            )
        return cls(*match.groups())

    @property
    def name(self) -> str:
        return f"{self.source}_{self.metric}"

    def __str__(self) -> str:
        return f"{self.direction}:{self.name}" if self.direction else self.name

    def find(self, kinds: Mapping[str, Any]) -> Any:
        """Returns the metric's kind, if it is measured (`sums.kinds_by_name`); else None.

        A metric with several values has the names NAME_0 or NAME_KEY.
        """
        several = (name for name, kind in kinds.items() if kind.is_several and self.metric.startswith(f"{name}_"))
        return kinds.get(self.metric) or next((kinds[name] for name in several), None)

    def directed(self, kinds: Mapping[str, Any], others: bool = False) -> Monitored:
        """Returns the metric with its direction: the spelling's, else the metric's, else the name's.

        Args:
          kinds: the kinds of the measured metrics, by name; empty if unknown.
          others: whether there may be others, of `Trainer.compute_metrics`.

        Raises:
          UsageError: it is not measured, or its direction is unknown.
        """
        if (kind := self.find(kinds)) is None and kinds and not others:
            raise self.not_measured(kinds)
        direction = self.direction or getattr(kind, "direction", None) or self.by_name.direction
        if direction is None:
            raise UsageError(
                f"monitor={self}: whether a higher or a lower {self.metric} is better is not known; use "
                f"max:{self.name} or min:{self.name}"
            )
        return dataclasses.replace(self, direction=direction)

    @property
    def by_name(self) -> Monitored:
        """The metric with the direction of its spelling or name, if any."""
        metric = self.metric.rpartition("/")[2]  # without the name of one of several evaluation sets
        is_loss = metric == "loss" or metric.endswith(_MINIMIZED)
        return dataclasses.replace(self, direction=self.direction or ("min" if is_loss else None))

    def not_measured(self, names: Collection[str]) -> UsageError:
        """Returns the error for a metric that is not among the measured ones."""
        measured = ", ".join(f"{self.source}_{name}" for name in sorted(names))
        return UsageError(f"monitor={self} is not measured in this run; use one of {measured}")

    def described(self) -> str:
        """Describes it in a few words."""
        return f"{self.name}, {_WORDS[self.direction]} is better" if self.direction else self.name
