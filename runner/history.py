"""A run's history, an entry for each window of training metrics or evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..engine.errors import importing
from ..engine.hooks import Status, Windowed
from ..engine.hooks.base import Period
from ..engine.meter import Meter, Totals
from ..engine.state import TrainState

if TYPE_CHECKING:
    from ..engine.record.recorder import Recorder


class HistoryEntries(list[dict[str, Any]]):
    """The entries of a history, dictionaries, in their order.

    Attributes:
      history: values of each epoch of `crankshaft.fit` by name, as in Keras's History.
      epoch: numbers of these epochs, as in Keras's History.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []

    def column(self, name: str) -> list[Any]:
        """Returns a column's values, of `eval_loss` for example, from entries that have it; None without a value."""
        return [entry[name] for entry in self if name in entry]

    def to_pandas(self):
        """Returns a `pandas.DataFrame` with a column for each name in any entry.

        Raises:
          UsageError: pandas is not installed.
        """
        with importing("pandas", "pandas is not installed; pip install pandas"):
            import pandas
        return pandas.DataFrame(list(self))


class History(Windowed):
    """Keeps `entries`, and writes each to the run's record, from which a resumed run has those up to its checkpoint.

    It is plain JSON: step, epoch (with its fraction), seconds since the run began in this process, examples_per_sec of
    the window and what `Totals.input` has of it, `train_NAME` of each metric of the window that ends there and
    `eval_NAME` of each metric of an evaluation made there.

    Args:
      record: hook that writes the run's record, which acts before this one; None keeps the entries in memory only.
      periods: windows of the training metrics, in steps, 0 for none; the run's end and evaluations end one too.
    """

    name = "history"

    def __init__(self, record: Recorder | None, periods: Collection[int | Period]):
        super().__init__(0, at_end=True, more=periods)
        self._entries = HistoryEntries()
        self._past_until: int | None = None  # the step up to which entries of the record are still to be read
        self._record = record
        self._seconds = 0.0

    def attach(self, state: TrainState, meter: Meter) -> None:
        super().attach(state, meter)
        self._run = meter.window(leaves_out_first=True)  # the first call compiles, which is no rate of the run

    def begin(self, status: Status) -> None:
        self.rewind(status)  # steps after the checkpoint are repeated, and write their entries again
        if self._record is not None:
            self._past_until = status.step

    def rewind(self, status: Status) -> None:
        self._entries[:] = [entry for entry in self._entries if entry["step"] <= status.step]
        if self._past_until is not None:
            self._past_until = min(self._past_until, status.step)

    @property
    def entries(self) -> HistoryEntries:
        """The entries so far. Those of earlier processes are read when this is asked for first: they may be many."""
        if self._record is not None and self._past_until is not None:
            self._entries[:0] = self._record.past_rows(self._past_until)
            self._past_until = None
        return self._entries

    def is_due(self, status: Status) -> bool:
        return status.evaluation is not None or super().is_due(status)

    def __call__(self, status: Status) -> None:
        self._seconds += status.segment.seconds
        super().__call__(status)

    def act(self, status: Status) -> None:
        totals = self.window.take()
        entry = {
            "step": status.step,
            "epoch": status.epochs,
            "seconds": self._seconds,
            "examples_per_sec": totals.speeds.get("examples_per_sec"),
            **totals.input,
            **{f"train_{name}": mean for name, mean in totals.steady_means().items()},
            **{f"eval_{name}": value for name, value in (status.evaluation or {}).items()},
            **getattr(status.evaluation, "batches", {}),
        }
        # JSON has no inf and nan.
        entry = {name: value if value is None or math.isfinite(value) else None for name, value in entry.items()}
        self._entries.append(entry)
        if self._record is not None:
            self._record.write("row", **{name: value for name, value in entry.items() if name != "step"})

    def means(self) -> dict[str, float | None]:
        """Returns the training metrics' means of the newest entry that has them; before one, of the steps so far."""
        for entry in self._newest_first():
            if means := {name[6:]: value for name, value in entry.items() if name.startswith("train_")}:
                return {**means, **self.window.totals.figures}  # those set at the last step, after this hook
        return {**self.window.totals.steady_means()}

    def _newest_first(self) -> Iterator[dict[str, Any]]:
        """Yields this process's entries, and then all: those of others are read only if these do not do."""
        yield from reversed([*self._entries])
        yield from reversed(self.entries)

    def rates(self) -> dict[str, float | None]:
        """Returns the run's rates after the first call; of the first if it was all, None without a step."""
        totals = self._run.totals
        return {"steps_per_sec": None, "examples_per_sec": None, **totals.speeds, **totals.input}


class Means(Mapping[str, float]):
    """The means of metrics by name. Reading the first of them waits for the device."""

    def __init__(self, totals: Totals):
        self._totals = totals

    @functools.cached_property
    def _read(self) -> dict[str, float]:
        return self._totals.steady_means()

    def __getitem__(self, name: str) -> float:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def __repr__(self) -> str:
        return repr(self._read)
