"""A pytest plugin for Keras's tests: replaces Keras's `fit` by `crankshaft.fit`, and records how each test ends."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Collection
from pathlib import Path

import pytest
import tensorflow as tf

# Tests of Keras's internals and of documented differences, by a pattern of their names, each with the reason.
INTERNALS = {
    "*::test_fit_sparse_*": "replaces assign_sub of Keras's optimizer, which kernels of the engine don't call",
    "*::BackupAndRestoreCallbackTest::*": "reads attributes of the callback, in whose place run_dir resumes",
    "*::SwapEMAWeightsTest::test_swap_ema_weights": "compares a loss to the last bit; here sums are in float64",
    "*::test_swap_ema_weights_with_loss_scale_optimizer": "compares a loss to the last bit; here sums are in float64",
    "*_unknown_data_size_not_match_*": "a dataset of unknown length begins again within an epoch",
    "*::test_fit_with_data_adapter_generator": "a generator that has ended is an error in a second epoch",
    "*::test_functional_dict_outputs_dict_losses_invalid_keys": "Keras's KeyError is explained by another error",
    "*::test_multi_optimizer_with_model_fit": "an optimizer with its own apply is refused",
    "*::test_retracing": "counts Python's calls of train_step, which is also traced for its variables and its checks",
    "*::test_custom_summary": "a layer's own summaries are written in training only",
}


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
