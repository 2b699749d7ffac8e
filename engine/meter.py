"""Measures a run: merges the statistics of the inner loop's calls for all that report them. Runs on the host.

The loop passes each call's `Segment` to one `Meter`. A reporter, such as a hook, has a `Window` of the meter, and takes
from it the `Totals` of the calls since it last took them. Each call is merged once, for any number of windows: the
meter keeps one `Totals` from each window's beginning to the next one's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .errors import UsageError
from .metrics.sums import LazyMerge, LoopSums, Sums

if TYPE_CHECKING:
    from .strategies.loop_result import WorkerFigures


class Segment(NamedTuple):
    """The statistics of one call of the inner loop.

    Attributes:
      first_step: the global step at which it began.
      examples: the number of examples in their batches; an epoch's last batch may be smaller.
      sums: the metrics, unread: reading waits for the device. None before the first call, and of a step left out.
      seconds: wall time.
      input_seconds: the part of `seconds` spent waiting for input.
      input_bytes: the bytes read meanwhile by this process, mostly ahead; None if steps read no data.
      steps_ahead: steps whose examples are read but not used yet; None if unknown.
      workers: each worker's figures, unread, if there are several (`WorkerFigures`).
    """

    first_step: int
    steps: int = 0
    examples: int = 0
    sums: LoopSums | None = None
    seconds: float = 0.0
    input_seconds: float = 0.0
    input_bytes: int | None = None
    steps_ahead: float | None = None
    workers: WorkerFigures | None = None
    compiles: bool = False


class Totals:
    """Merged calls: their steps, examples, time and input, the metrics and the workers' figures.

    Args:
      sums: the metrics' sums, as `host_state` returned them.
    """

    def __init__(self, sums: Mapping[str, Sequence] | None = None):
        self._counts: dict[str, float] = {}
        self._sums, self._figures = Sums(sums), _WorkerFigures()
        self.figures: dict[str, float] = {}  # that hooks have set, the newest of each name

    def add(self, segment: Segment) -> None:
        """Adds a call, without waiting for it."""
        counts = {"calls": 1, "seconds": segment.seconds, "steps": segment.steps, "examples": segment.examples}
        counts["input_seconds"] = segment.input_seconds
        if segment.input_bytes is not None:
            counts["input_bytes"] = segment.input_bytes
        if segment.steps_ahead is not None:
            counts |= {"steps_ahead": segment.steps_ahead, "calls_ahead": 1}
        if segment.compiles:
            counts |= {"compile_seconds": segment.seconds, "compile_steps": segment.steps}
        self._count(counts)
        if segment.sums is not None:
            self._sums.add(segment.sums)
        if segment.workers is not None:
            self._figures.add(segment.workers)

    def extend(self, later: Totals) -> None:
        """Adds later calls, without waiting for them."""
        self._count(later._counts)
        self._sums.extend(later._sums)
        self._figures.extend(later._figures)
        self.figures |= later.figures

    def _count(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    @property
    def calls(self) -> int:
        """The number of calls in this process."""
        return int(self._counts.get("calls", 0))

    @property
    def seconds(self) -> float:
        """Wall time of the calls."""
        return self._counts.get("seconds", 0.0)

    @property
    def steps(self) -> int:
        """The number of steps of the calls."""
        return int(self._counts.get("steps", 0))

    @property
    def compiling(self) -> tuple[float, int]:
        """Seconds and steps of the calls that compiled a program."""
        return self._counts.get("compile_seconds", 0.0), int(self._counts.get("compile_steps", 0))

    @property
    def speeds(self) -> dict[str, float]:
        """`steps_per_sec` and `examples_per_sec`; empty if no time has passed."""
        return {f"{name}_per_sec": self._counts[name] / self.seconds for name in ("steps", "examples") if self.seconds}

    @property
    def input(self) -> dict[str, float]:
        """Figures of this process's input; empty if no time has passed.

        `input_wait_fraction`: the fraction of the time in which steps wait for input. For data that steps read, from
        files or a dataset, also `input_wait_ms`, per step; `input_bytes_per_sec`; and if known, `input_steps_ahead`:
        for how many steps examples are read ahead, on average over the calls.
        """
        if not self.seconds:
            return {}
        counts, waited = self._counts, self._counts["input_seconds"]
        figures = {"input_wait_fraction": min(1.0, waited / self.seconds)}
        if "input_bytes" in counts:
            figures["input_wait_ms"] = 1e3 * waited / max(1.0, counts["steps"])
            figures["input_bytes_per_sec"] = counts["input_bytes"] / self.seconds
        if counts.get("calls_ahead"):
            figures["input_steps_ahead"] = counts["steps_ahead"] / counts["calls_ahead"]
        return figures

    def means(self) -> dict[str, float]:
        """Returns the metrics' means, and hooks' figures, by name. Waits for the calls."""
        return {**self._sums.means(), **self.figures}

    def steady_means(self) -> dict[str, float]:
        """Returns `means` without the gradients' norm, which is measured only at steps at which a hook is due."""
        return {name: mean for name, mean in self.means().items() if name != "gradient_norm"}

    def workers(self) -> list[dict[str, float]]:
        """Returns each worker's figures; an empty list if there is one worker. Waits for the calls.

        Milliseconds per step: `step_ms` (total), `own_ms` (without waiting for other workers) and `reduce_wait_ms`,
        these three not on GPUs; `input_wait_ms`. Also `gradient_norm`, of the latest call at whose end a hook was due,
        if any. With parameter servers there is no `reduce_wait_ms` and no `gradient_norm`, and a worker without steps
        has no `step_ms` and `own_ms`; these are added: `steps`, `lag` (how many more steps the fastest did) and
        `staleness` (the mean number of others' updates between its pull and its push).
        """
        return self._figures.by_worker()

    def host_state(self) -> dict[str, list]:
        """Returns the metrics' sums, and figures as such, as plain JSON. Waits for the calls."""
        return {**self._sums.host_state(), **{name: ["mean", value, 1.0] for name, value in self.figures.items()}}


def merged(some: Iterable[Totals]) -> Totals:
    """Merges totals, in order, into new ones."""
    whole = Totals()
    for totals in some:
        whole.extend(totals)
    return whole


class Window:
    """A view of a meter: the calls since they were last taken. Made by `Meter.window`.

    It has no totals of its own, since windows overlap: a call would be merged once for each. And totals have no
    beginning, since some are of calls that no window is of, such as a checkpoint's or several merged ones.
    """

    def __init__(self, meter: Meter, leaves_out_first: bool):
        self._meter, self.leaves_out_first = meter, leaves_out_first
        self.restored: Totals | None = None
        self.start = 0

    @property
    def totals(self) -> Totals:
        """A copy of the calls since they were last taken, without taking them."""
        restored = [self.restored] if self.restored else []
        return merged([*restored, *self._meter.since(self.start)])

    @property
    def seconds(self) -> float:
        """Wall time of the calls since they were last taken in this process."""
        return sum(span.seconds for span in self._meter.since(self.start))

    @property
    def calls(self) -> int:
        """The number of calls since they were last taken in this process."""
        return sum(span.calls for span in self._meter.since(self.start))

    def take(self) -> Totals:
        """Returns the calls since they were last taken, and begins again with the next call."""
        totals, self.restored = self.totals, None
        self._meter.begin(self)
        return totals


class Meter:
    """Merges the calls of a loop for its windows. A checkpoint keeps the metrics of named windows."""

    def __init__(self):
        self._spans = {0: Totals()}  # each from the beginning of a window to that of the next, by its number
        self._windows: list[Window] = []
        self._named: dict[str, Window] = {}
        self._calls = 0
        self._metrics = set[str]()

    def window(self, name: str | None = None, leaves_out_first: bool = False) -> Window:
        """Makes a window, which begins with the next call.

        Args:
          name: the name by which a checkpoint keeps the window, numbered if repeated: `log-2`. None is not kept.
          leaves_out_first: whether the run's first call, which compiles, is left out once there is another.
        """
        window = Window(self, leaves_out_first)
        self._windows.append(window)
        self.begin(window)
        if name is not None:
            self._named[unused(name, self._named)] = window
        return window

    def add(self, segment: Segment) -> None:
        """Adds a call of the loop."""
        if self._calls == 1:
            for window in self._windows:
                if window.leaves_out_first:
                    window.take()
        self._calls += 1
        self._metrics.update(spec.name for spec in (segment.sums.specs if segment.sums else ()))
        self._spans[max(self._spans)].add(segment)

    def note(self, figures: Mapping[str, float]) -> None:
        """Adds figures of a hook. Raises `UsageError` for a name that a metric has."""
        if both := sorted(figures.keys() & self._metrics):
            raise UsageError(f"status.figures has {both[0]}, and so has the step's metrics; use another name")
        self._spans[max(self._spans)].figures |= {name: float(value) for name, value in figures.items()}

    def since(self, start: int) -> list[Totals]:
        """Returns the merged calls since a window's `start`, in order."""
        return [span for number, span in self._spans.items() if number >= start]

    def begin(self, window: Window) -> None:
        """Makes a window begin with the next call."""
        newest = max(self._spans)
        if self._spans[newest].calls or self._spans[newest].figures:
            newest += 1
            self._spans[newest] = Totals()
        window.start = newest
        starts, spans = {window.start for window in self._windows}, {}
        for number, span in self._spans.items():
            if number in starts or number == newest:
                spans[number] = last = span
            elif spans:  # no window begins here any more
                last.extend(span)
        self._spans = spans

    def forget(self) -> None:
        """Drops the calls in named windows, since the metrics are of other data."""
        for window in self._named.values():
            window.take()

    def host_state(self) -> dict:
        """Returns the metrics' sums of each named window, as plain JSON. Waits for the calls."""
        return {name: sums for name, window in self._named.items() if (sums := window.totals.host_state())}

    def restore_host_state(self, values: Mapping[str, Mapping[str, Sequence]]) -> None:
        """Restores the result of `host_state`; windows that it lacks begin with the next call."""
        self.forget()
        for name, window in self._named.items():
            window.restored = Totals(values.get(name))


def unused(name: str, names: Iterable[str]) -> str:
    """Returns a name, numbered if it is among `names`: `log-2`."""
    numbered = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in numbered if candidate not in names)


class _WorkerFigures(LazyMerge[list[dict[str, float]]]):
    """The figures of workers at the end of calls (`WorkerFigures`), summed by worker."""

    def by_worker(self) -> list[dict[str, float]]:
        """Returns `Totals.workers`."""
        sums = self._read([])
        most = max((worker["steps"] for worker in sums), default=0.0)
        return [_figures(worker, most) for worker in sums]

    def _joined(self, older: list[dict[str, float]], newer: list[dict[str, float]]) -> list[dict[str, float]]:
        joined = []
        for before, after in zip(older, newer, strict=True):
            added = {name: before[name] + value for name, value in after.items()}
            if "gradient_norm" in after:  # 0 if nothing was due at a call's end
                added["gradient_norm"] = after["gradient_norm"] or before["gradient_norm"]
            joined.append(added)
        return joined


def _figures(sums: dict[str, float], most_steps: float) -> dict[str, float]:
    per_step = 1e3 / max(1.0, sums["steps"])
    figures = {"input_wait_ms": per_step * sums["input_seconds"]}
    if sums.get("gradient_norm"):
        figures["gradient_norm"] = sums["gradient_norm"]
    if "seconds" in sums and sums["steps"]:
        figures["step_ms"] = per_step * sums["seconds"]
        figures["own_ms"] = per_step * (sums["seconds"] - sums.get("reduce_seconds", 0.0))
    if "reduce_seconds" in sums:
        figures["reduce_wait_ms"] = per_step * sums["reduce_seconds"]
    if "staleness" in sums:
        figures |= {"steps": sums["steps"], "lag": most_steps - sums["steps"]}
        figures["staleness"] = sums["staleness"] / max(1.0, sums["steps"])
    return figures
