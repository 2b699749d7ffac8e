"""Shows a run: a live bar in a terminal, plain lines elsewhere, or lines of JSON; models' summaries."""

from __future__ import annotations

import atexit
import contextlib
import html
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from ..engine.errors import UsageError, as_line, rounded
from ..engine.hooks import Hook, Status
from ..engine.machine.threads import PROCESS
from ..engine.mesh import sharded
from ..engine.meter import Meter, Totals, merged
from ..engine.state import TrainState
from . import terminal
from .host.text_files import finite

MODES = ("auto", "bar", "plain", "json", "off")
_HIDDEN = {"gradient_norm", "skipped"}  # figures for TensorBoard and the NaN guard
_LEAST_BAR = 1  # columns
_RECENT_SECONDS = 3.0  # span of the rate that is shown
_SUMMARY_COLUMNS, _LEAST_SUMMARY = 100, 32  # columns; Keras refuses to print it in less


class Progress(Hook):
    """Shows step, metrics, examples a second, time left and evaluations. Reads metrics only when it shows them.

    Args:
      mode: "bar", redrawn in place; "plain", a line now and then; "json", the same as JSON;
        "off"; "auto", a bar in a terminal or a notebook.
      file: stream to write to; None is standard output.
      redraw_seconds: at least so long from one redrawing of the bar to the next. Each costs about a millisecond.
      line_seconds: at least so long from one plain line to the next, except for evaluations and the last step.
    """

    name = "progress"

    def __init__(self, mode: str = "auto", file=None, redraw_seconds=0.2, line_seconds=10.0, clock=time.monotonic):
        self._file = file or sys.stdout
        self.mode = resolved_mode(mode, self._file)
        self._seconds_between = line_seconds if self.mode in ("plain", "json") else redraw_seconds
        self._clock = clock
        self._bar: Bar | CellBar | None = None
        self._recent: list[Totals] = []  # one at most
        self._shown_at = 0.0
        self._shown_step: int | None = None

    def attach(self, state: TrainState, meter: Meter) -> None:
        # A resumed run's first line has the steps since the last one, too.
        self._metrics = meter.window(None if self.mode == "off" else self.name)
        self._calls = meter.window(leaves_out_first=True)

    def begin(self, status: Status) -> None:
        self._shown_at = self._clock()
        if self.mode == "cell":
            self._bar = CellBar(status.until_step)
        elif self.mode == "bar":
            self._bar = Bar(self._file, _step(status), status.until_step, status.step)
            atexit.register(self.close)  # after an exception, the terminal's cursor has to come back

    def rewind(self, status: Status) -> None:
        self._shown_step = None

    def __call__(self, status: Status) -> None:
        if self.mode == "off":
            return
        now = self._clock()
        if status.evaluation is not None or status.last or status.stop or now - self._shown_at >= self._seconds_between:
            self._shown_at = now
            self._show(status)
        if status.evaluation is not None and self.mode == "json":
            self._print(evaluation_line(status.step, status.evaluation, "json"))
        elif status.evaluation is not None:
            title = getattr(status.evaluation, "title", "evaluation")
            self._print("  ".join([_step(status), title, *metrics_shown(status.evaluation)]))

    def end(self, status: Status) -> None:
        if self.mode != "off" and status.segment.steps and self._shown_step != status.step:
            self._show(status)
        self.close()

    def close(self) -> None:
        """Restores the terminal; may be called again, and has to be where the loop ended by an exception."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            atexit.unregister(self.close)

    def _show(self, status: Status) -> None:
        # The line of a stop is one more: the next has all steps since the one before.
        means = (self._metrics.totals if status.stop else self._metrics.take()).means()
        self._shown_step = status.step
        if self.mode == "json":
            figures = {"epoch": status.epochs, "until_step": status.until_step, "seconds_left": status.seconds_left}
            self._print(_json_line("window", status.step, means, **figures, **self._calls.take().speeds))
            return
        metrics = metrics_shown(means)
        epoch = f"epoch {rounded(status.epochs)}"
        speed = f"{rate:,.0f} examples/s" if (rate := self._rate()) else ""
        left = "" if status.seconds_left is None else f"{duration(status.seconds_left)} left"
        if self._bar is None:
            self._print("  ".join(filter(None, [_step(status), *metrics, epoch, speed, left])))
            return
        self._bar.draw(status.step, *_fitting(_step(status), metrics, [epoch, left, speed], self._bar.width))

    def _rate(self) -> float:
        """Computes examples per second since the last line or, beside a bar, over the last seconds."""
        if self._bar is None:
            return self._calls.take().speeds.get("examples_per_sec", 0.0)
        calls = self._calls.totals
        recent = calls if calls.seconds >= _RECENT_SECONDS else merged([*self._recent, calls])
        if calls is recent and calls.calls > 1:
            self._recent = [self._calls.take()]
        return recent.speeds.get("examples_per_sec", 0.0)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.print(line)
        else:
            print(terminal.fitted(line, self._file), file=self._file, flush=True)


class Bar:
    """A progress bar at the bottom of the terminal; lines printed meanwhile, by logging too, go above it.

    `breakpoint` leaves the terminal to the debugger: nothing is drawn until that no longer traces the program.

    Args:
      file: the terminal.
      description: text before the bar.
      total: the amount of work; None if it is unknown.
      stays: whether it is left in the terminal when it is closed.
    """

    def __init__(self, file, description: str, total: float | None, completed: float = 0, stays: bool = True):
        from rich import progress  # a tenth of what a short run imports

        self._console = Console(file=file, highlight=False, force_terminal=True)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None if self._console.width < 100 else 40),
            progress.TextColumn("{task.fields[text]}"),
            console=self._console,
            auto_refresh=False,
            transient=not stays,
            redirect_stderr=terminal.is_terminal(sys.stderr),  # a standard error that goes to a file stays there
        )
        self._task = self._progress.add_task(description, total=total, text="starting")
        self._progress.update(self._task, completed=completed)
        self._start()
        self._hook = sys.breakpointhook = _BreakpointHook(self._stop, sys.breakpointhook)

    @property
    def width(self) -> int:
        """Columns for the description and the text, beside the least bar and the spaces between them."""
        return self._console.width - _LEAST_BAR - 2

    def draw(self, completed: float, description: str, text: str) -> None:
        """Redraws the bar, which takes about a millisecond; `text` follows it."""
        self._progress.update(self._task, completed=completed, description=description, text=text)
        if self._progress.live.is_started:
            self._progress.refresh()
        elif sys.gettrace() is None:
            self._start()

    def print(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(as_line(line), markup=False)

    def close(self) -> None:
        """Restores the terminal."""
        if sys.breakpointhook is self._hook:
            sys.breakpointhook = self._hook.programs
        self._stop()

    def _start(self) -> None:
        before = sys.stderr
        self._progress.start()
        self._stderr = sys.stderr  # rich's, which writes above the bar
        terminal.redirect_log(before, self._stderr)

    def _stop(self) -> None:
        self._progress.stop()
        terminal.redirect_log(self._stderr, sys.stderr)


class _BreakpointHook:
    """Stops a bar, and is then the program's `sys.breakpointhook`.

    A debugger stops in the frame that has called it. So none of this is one: a property's has ended by then.
    """

    def __init__(self, stop: Callable[[], None], programs: Callable):
        self._stop, self.programs = stop, programs

    @property
    def __call__(self) -> Callable:
        self._stop()
        return self.programs


class CellBar:
    """A progress bar below a notebook's cell, redrawn in place; lines printed meanwhile stand below it.

    Args:
      total: the amount of work; None if it is unknown.
    """

    width = _SUMMARY_COLUMNS

    def __init__(self, total: float | None):
        self._total = total
        self._cell: int | None = None
        self._shown: Any = None

    def draw(self, completed: float, description: str, text: str) -> None:
        """Redraws the bar; the first time in a cell it is a new one."""
        from IPython import display, get_ipython

        # A display belongs to the cell that made it: in a later cell an update would redraw the earlier one's.
        line = f"{description}  {text}"
        bar = f'<progress value="{completed}" max="{self._total}"></progress> ' if self._total else ""
        bundle = {"text/plain": line, "text/html": f"{bar}<code>{html.escape(line)}</code>"}
        if self._cell == (cell := get_ipython().execution_count):
            self._shown.update(bundle, raw=True)
        else:
            self._cell, self._shown = cell, display.display(bundle, raw=True, display_id=True)

    def print(self, line: str) -> None:
        """Prints a line below the bar."""
        print(as_line(line), flush=True)

    def close(self) -> None:
        """Does nothing: the bar stays as it is."""


def watch(mode: str = "auto", file=None, line_seconds: float = 10.0, clock=time.monotonic) -> Callable:
    """Makes an `engine.data.streamed.Watch` that shows reading beside training, as `Progress` shows the steps.

    Args:
      mode, file: see `Progress`.
      line_seconds: at least so long from one plain line to the next; the last one is always there.
    """

    @contextlib.contextmanager
    def watched(title: str, total: int | None):
        to = file or sys.stdout
        shown = resolved_mode(mode, to)
        bar = Bar(to, title, total, stays=False) if shown == "bar" else None
        least, last, count = 0.2 if bar else line_seconds, clock(), 0

        def text() -> str:
            return f"{count:,}" if total is None else f"{count:,} of {total:,}"

        def done(now: int) -> None:
            nonlocal last, count
            count = now
            if shown != "off" and clock() - last >= least:
                last = clock()
                if bar:
                    bar.draw(count, title, text())
                else:
                    print(terminal.fitted(f"{title}: {text()} so far", to), file=to, flush=True)

        try:
            yield done
        finally:
            if bar:
                bar.close()
        if shown != "off":
            print(terminal.fitted(f"{title}: {text()}", to), file=to, flush=True)

    return watched


def resolved_mode(mode: str, file) -> str:
    """Resolves --progress: "bar" in a terminal, "cell" in a notebook, "plain", or "off". Raises `UsageError`."""
    if mode not in MODES:
        raise UsageError(f"progress={mode} is unknown; use one of {', '.join(MODES)}")
    if mode in ("auto", "bar") and file is sys.stdout and Console().is_jupyter:
        return "cell"
    if mode != "auto":
        return mode
    return "bar" if terminal.is_terminal(file) else "plain"


def print_model_summary(models: Sequence, file=None, tables: Sequence = ()) -> None:
    """Prints Keras's summary of each model, as wide as the terminal, and a line for each embedding.

    For a sharded model the summary counts each replica's parameters; a line has the total.

    Args:
      models: Keras models, built; nothing is printed of a layer that only trains like one.
      file: stream to write to; None is standard output.
      tables: `parts.tables.Embedding`s, built.
    """
    file = file or sys.stdout
    width = _SUMMARY_COLUMNS
    if terminal.is_terminal(file):
        width = min(max(terminal.columns(), _LEAST_SUMMARY), width)
    for model in (model for model in models if hasattr(model, "summary")):
        print(_summary(model, width), file=file, flush=True)
        held = sum(math.prod(variable.shape) for variable in model.variables)
        if (whole := sum(map(sharded.size, model.variables))) != held:
            print(f"Of {whole:,} parameters, each replica holds these {held:,}.", file=file, flush=True)
    for table in tables:
        size = f"{table.rows:,} rows x {table.width}, {4e-6 * table.rows * table.width:,.1f} MB"
        print(f"Embedding: {table.name!r}, {size}, shards: {len(table.shards)}", file=file, flush=True)


def _summary(model, width: int) -> str:
    texts: list[str] = []
    hiding: contextlib.AbstractContextManager = contextlib.nullcontext()
    if Console().is_jupyter:
        from IPython.utils.capture import capture_output

        hiding = capture_output(stdout=False, stderr=False)  # rich displays an empty element
    with PROCESS, hiding:  # the variable is the whole process's
        before = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = str(width)  # Keras would truncate wider lines otherwise
        try:
            model.summary(width, print_fn=lambda text, **_: texts.append(text))
        finally:
            os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return "".join(texts).rstrip("\n")


def duration(seconds: float) -> str:
    """Formats seconds as 42s, 3m07s, 2h05m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _step(status: Status) -> str:
    return f"step {status.step:,}" if status.until_step is None else f"step {status.step:,}/{status.until_step:,}"


def metrics_shown(means: Mapping[str, float]) -> list[str]:
    """Formats metrics, the loss first, the others by name."""
    names = sorted((name for name in means if name not in _HIDDEN), key=lambda name: (name != "loss", name))
    return [f"{name} {_number(means[name])}" for name in names]


def evaluation_line(step: int, evaluated: Mapping[str, float], log_format: str) -> str:
    """Formats an evaluation for people, its metrics sorted by name; or as `log_format="json"`."""
    if log_format == "json":
        return _json_line("evaluation", step, evaluated, **getattr(evaluated, "batches", {}))
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in sorted(evaluated.items()))
    return f"{getattr(evaluated, 'title', 'evaluation')} at step {step}: {metrics}"


def _json_line(event: str, step: int, metrics: Mapping[str, float], **figures: Any) -> str:
    """Formats a report with the keys that the record's event of this kind has."""
    values = {"event": event, "time": time.time(), "step": step, **figures, "metrics": dict(metrics)}
    # Without a space, at which a terminal's line is wrapped, and the one control character that JSON does not escape.
    return json.dumps(finite(values), separators=(",", ":")).replace("\x7f", r"\u007f")


def _fitting(step: str, metrics: list[str], more: list[str], width: int) -> tuple[str, str]:
    """Fits a bar's (description, text) into `width` columns: drops rates first, then spaces, and only then metrics."""
    parts = [*metrics, *filter(None, more)]
    while len("  ".join([step, *parts])) > width and len(parts) > len(metrics):
        parts.pop()
    if len("  ".join([step, *parts])) <= width:
        return step, "  ".join(parts)
    step = step.removeprefix("step ")
    while len(" ".join([step, *parts])) > width and len(parts) > 1:
        parts.pop()
    return step, " ".join(parts)


def _number(value: float) -> str:
    """Formats a number to four decimals, or to four digits where it is too small to show in them."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3e}"
