"""What holds for all tests: four logical CPU devices where there is TensorFlow, which tests are fast, their order."""

from __future__ import annotations

import collections
import gc
import math
import os
import pathlib
import random
import sys

import pytest

# Tests are of CPUs, also beside a GPU, which rounds otherwise; CUDA_VISIBLE_DEVICES=0 shows it to them.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Whoever asks for one of these, itself or by another fixture, starts processes or builds whole runs.
_COSTLY = {"bench", "crank", "crank_each", "digits_run", "inside", "start", "start_workers"}
# And so does a file that has one of these: what starts processes, what trains, what runs are asked of.
_COSTLY_NAMES = {"subprocess", "Replicated", "crankshaft", "fit"}
# For each file of tests, as a path in tests/, whether `make test` runs one of its tests.
IN_MAKE_TEST = pytest.StashKey[dict[str, bool]]()
# A line for each file of tests that takes a second or more: how many its tests took, and its path.
_DURATIONS = pathlib.Path(__file__).parent / "durations.txt"


def _durations() -> dict[str, float]:
    lines = _DURATIONS.read_text("utf-8").splitlines()
    return {path: float(seconds) for seconds, path in map(str.split, lines)}


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are
def pytest_collection_modifyitems(config, items):
    """Marks what `make test-fast` runs: tests that neither start processes nor build whole runs.

    Left out are those with a mark thorough of their own. Of the others, `make test` leaves out those marked thorough,
    themselves or with their file, which `make test-rest` runs.

    The files that take longest come first, or at the end a process would work on a long one while others have nothing
    left.
    """
    for item in items:
        is_costly = _COSTLY & set(item.fixturenames) or _COSTLY_NAMES & set(vars(item.module))
        is_thorough = any(mark.name == "thorough" for mark in item.own_markers)  # itself, not its file
        if not is_costly and not is_thorough:
            item.add_marker("fast")
    in_make_test: dict[str, bool] = {}
    for item in items:
        path = _file(item.nodeid).removeprefix("tests/")
        is_left_out = item.get_closest_marker("slow") or item.get_closest_marker("clusters")
        is_thorough = item.get_closest_marker("thorough") and not item.get_closest_marker("fast")
        in_make_test[path] = in_make_test.get(path, False) or not (is_left_out or is_thorough)
    config.stash[IN_MAKE_TEST] = in_make_test
    seconds = _durations()
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), math.inf))


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.txt, the files' order")


def pytest_configure(config):
    if config.getoption("write_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_DurationsWriter())


class _DurationsWriter:
    """Replaces the lines of the files that were run."""

    def __init__(self):
        self._seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session):
        seconds = {path: n for path, n in _durations().items() if (session.config.rootpath / path).exists()}
        seconds = {path: round(n) for path, n in {**seconds, **self._seconds}.items() if n >= 0.5}
        lines = [f"{n:4} {path}\n" for path, n in sorted(seconds.items(), key=lambda item: (-item[1], item[0]))]
        _DURATIONS.write_text("".join(lines), "utf-8")


def pytest_collection_finish():
    """Not before: tests that need no TensorFlow do not wait for it."""
    if "tensorflow" in sys.modules:
        from tests.logical_cpus import make_four

        make_four()


# Tracing makes many objects, few of them garbage: to look through them each 700 takes a twentieth of the tests' time.
gc.set_threshold(5_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seeds Python's `random`, from which Keras draws missing seeds: a test's weights are the same in each run."""
    random.seed(item.nodeid)


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage():
    """What is there before a file's tests, TensorFlow's modules above all, is not gone through when garbage is
    collected, as at each end of a run: a quarter of the time of `tests/launch` went there."""
    gc.collect()
    gc.freeze()
