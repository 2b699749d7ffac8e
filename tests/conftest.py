"""What holds for all tests: four logical CPU devices where there is TensorFlow, and which tests are fast."""

from __future__ import annotations

import gc
import os
import sys

import pytest

# Tests are of CPUs, also beside a GPU, which rounds otherwise; CUDA_VISIBLE_DEVICES=0 shows it to them.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Whoever asks for one of these, itself or by another fixture, starts processes or builds whole runs.
_COSTLY = {"bench", "crank", "crank_each", "digits_run", "inside", "start_workers"}
# And so does a file that has one of these: what starts processes, what trains, what runs are asked of.
_COSTLY_NAMES = {"subprocess", "Replicated", "crankshaft"}


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are
def pytest_collection_modifyitems(items):
    """Marks what `make test-fast` runs: tests that neither start processes nor build whole runs.

    What takes longest comes first, or at the end a process would work on some long file while others have nothing left:
    files of several workers, which wait much, beside one another's; then those of whole runs.
    """
    for item in items:
        if not _COSTLY & set(item.fixturenames) and not _COSTLY_NAMES & set(vars(item.module)):
            item.add_marker("fast")
    whole = {item.path for item in items if not item.get_closest_marker("fast")}
    items.sort(key=lambda item: (item.path.parent.name != "distributed", item.path not in whole))


def pytest_collection_finish():
    """Not before: tests that need no TensorFlow do not wait for it."""
    if "tensorflow" in sys.modules:
        from tests.logical_cpus import make_four

        make_four()


# Tracing makes many objects, few of them garbage: to look through them each 700 takes a twentieth of the tests' time.
gc.set_threshold(5_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage():
    """What is there before a file's tests, TensorFlow's modules above all, is not gone through when garbage is
    collected, as at each end of a run: a quarter of the time of `tests/launch` went there."""
    gc.collect()
    gc.freeze()
