"""Writes and reads results. Nothing here starts TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine import logging
from . import explanations
from .command_line.config import Config
from .failures import EXIT_USAGE, RunError
from .host.locks import LockedRunDir
from .host.signals import EXIT_CODES
from .host.text_files import finite, write_json, write_run_file

if TYPE_CHECKING:
    from .base import BaseRun


SCHEMA = "crankshaft.benchmark/2"  # of the results that mode=benchmark writes
MOST_BYTES = 64 << 20  # of a file of a result that is read


class RunOutcomeWriter:
    """Writes how a run ends, with a result or by an error: where the run's files are, and to its record.

    Args:
      began: when the work on the run began, by `time.monotonic`.

    Attributes:
      lock: lock on the run's folder; None of a run that writes none, or does not have it yet.
      result: contents of result.json, once they are known.
      code: exit code, once it is known.
      run: run that is written about, once it is put together.
    """

    def __init__(self, config: Config, began: float):
        self._config, self._began = config, began
        self.lock: LockedRunDir | None = None
        self.result: dict[str, Any] = {}
        self.code = 0
        self.run: BaseRun | None = None
        self._has_ended = False

    def check_folder(self) -> None:
        """Raises `CrankshaftError` where the run_dir is not this run's any more, or a copy of it is not whole."""
        if self.lock:
            if self._config.remote:
                self._config.remote.check()
            self.lock.check()

    def set(self, result: dict[str, Any], code: int) -> None:
        """Sets the run's result and exit code, and writes the result."""
        self.check_folder()
        self._write(result, code)

    def end(self, kind, error: BaseException | None, trace) -> None:
        """Records how the run has ended, once; takes what `__exit__` does."""
        if self._has_ended:
            return
        self._has_ended = True
        if isinstance(error, Exception):
            self._write_failure(error)
        loop = getattr(self.run, "loop", None)  # a run that is not prepared to train has none
        if self.run is None or self.run.record is None or loop is None:
            return
        line, code = None, self.code
        if isinstance(error, Exception):
            code, line = explanations.explain(error, has_debug=False)
        elif error is not None:
            code, line = EXIT_CODES["SIGINT"], type(error).__name__
        self.run.record.finish(line or str(loop.status.stop or "done"), code, is_fault=isinstance(error, Exception))

    def end_stuck(self, line: str) -> None:
        """Records the end of a stuck process, and the reason."""
        self.end(RunError, RunError(line), None)

    def _write(self, result: dict[str, Any], code: int, to_run: bool = True) -> None:
        if self._config.mode != "generate":
            result.setdefault("wall_seconds", time.monotonic() - self._began)
        self.result, self.code = (result := finite(result)), code
        if to_run and self.lock and self.lock.is_in_place:
            write_run_file(self._config.files.result, result)
        if self._config.is_chief and self._config.result_json:
            write_json(self._config.result_json, result)

    def _write_failure(self, error: Exception) -> None:
        """Writes which error ended the run as its result.

        Before the first step a mistake writes none in the run's folder, and any error keeps the result of an earlier
        start there. A failure after the run's own result was written, such as in printing it, keeps that.
        """
        if self.result:
            return
        config, loop = self._config, getattr(self.run, "loop", None)
        code, line = explanations.explain(error, has_debug=False)
        has_result = self.lock and os.path.exists(config.files.result)
        to_run = bool(loop and loop.status.segment.steps) or not (code == EXIT_USAGE or has_result)
        model = config.program_trainer.__name__ if config.program_trainer else config.model
        step = loop.status.step if loop else None
        entries = {"mode": config.mode, "model": model, "run_dir": config.configured_run_dir, "step": step}
        try:
            self._write({**entries, "error": line, "exit_code": code}, code, to_run)
        except OSError as failed:
            logging.warning("the result is not written: %s", explanations.explain_system_error(failed))


def warn_of_full_tables(tables: Mapping[str, int]) -> None:
    """Warns of each table that had no free row for an id to admit."""
    for name in sorted({name.rpartition("/")[0] for name in tables}):
        rows, turned_away = (tables[f"{name}/{figure}"] for figure in ("rows_given", "turned_away"))
        if turned_away:
            logging.warning(
                "table %s: %s rows are in use, and %s times an id got no row of its own and shared row 0; "
                "give the table more rows, raise admit_after, or set evict_after",
                *(name, f"{rows:,}", f"{turned_away:,}"),
            )
