"""A pytest plugin for Keras's tests: replaces Keras's `fit` by `crankshaft.fit`, and records how each test ends."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Collection
from pathlib import Path

import pytest
import tensorflow as tf

# Tests of Keras's internals, by pattern, each with the reason.
INTERNALS: dict[str, str] = {}


class FitReplaced:
    """Records which tests call `fit`, and how each ends.

    Args:
      fit: "crankshaft", or "keras" to leave Keras's own.
      tests: the names of those to run; None is all.
      done: the names of those not to run.
      out: a file to which lines of JSON are added: one as a test begins, and one as it ends.
    """

    def __init__(self, fit: str, tests: Collection[str] | None, done: Collection[str], out: Path):
        self._tests, self._done, self._out = tests, done, out
        self._calls, self._raised = 0, None  # of the test that runs
        owner = next(each for each in tf.keras.Model.__mro__ if "fit" in vars(each))
        owner.fit = self._recorded(owner.fit if fit == "keras" else _fit)

    def _recorded(self, fit):
        @functools.wraps(fit)
        def recorded(*arguments, **keywords):
            self._calls += 1
            try:
                return fit(*arguments, **keywords)
            except BaseException as error:
                self._raised = error
                raise

        return recorded

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            item
            for item in items
            if (self._tests is None or item.nodeid in self._tests) and item.nodeid not in self._done
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._calls, self._raised = 0, None
        self._note({"name": item.nodeid, "calls": 0})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            message = " ".join(f"{type(error).__name__}: {error}".split())[:400] if error else ""
            kind = "skipped" if report.skipped else "passed" if report.passed else self._kind(item.nodeid, error)
            self._note({"name": item.nodeid, "calls": self._calls, "kind": kind, "message": message})
        return report

    def _kind(self, name: str, error) -> str:
        from crankshaft import UsageError

        if any(fnmatch.fnmatch(name, pattern) for pattern in INTERNALS):
            return "internals"
        if error is None or error is not self._raised:
            return "wrong"
        return "refused" if isinstance(error, UsageError) else "error"

    def _note(self, line: dict) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _fit(self, *arguments, **keywords):
    import crankshaft

    return crankshaft.fit(self, *arguments, **keywords).history
