"""What workers say whose data differs, by what each has: two threads for two workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.arrays import ArraySource
from crankshaft.parts.workers import agreement
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host import locks
from crankshaft.runner.saved import fingerprints
from tests.bench import split_of
from tests.waiting import PATIENCE


@dataclasses.dataclass
class Worker:
    """One of two workers, as far as those that compare what they have need each other."""

    host: int
    said: list[str | None]
    barrier: threading.Barrier
    num_hosts = 2
    host_names = ("worker 0", "worker 1")

    @property
    def is_chief(self) -> bool:
        return self.host == 0

    def exchange(self, value=None) -> list:
        self.said[self.host] = json.dumps(value)
        self.barrier.wait(PATIENCE)
        found = [json.loads(each) for each in self.said]
        self.barrier.wait(PATIENCE)
        return found


def split(examples: int, turned: bool = False, ids=None) -> dict[str, int]:
    """The fingerprint of so many examples."""
    x = np.random.default_rng(0).random((examples, 3), np.float32)
    return fingerprints.fingerprint(ArraySource((x[::-1] if turned else x, x[:, 0])), examples, ids)


def compared(*train: dict[str, int]) -> list[str | None]:
    """What each of two workers says that have these splits to train on, and the same one to evaluate on."""
    return agreed(
        lambda host, worker: agreement.check_data({"train": train[host], "eval": split(16)}, worker),
    )


def agreed(compare) -> list[str | None]:
    """What each of two workers says that call `compare(host, worker)`."""
    said, barrier = [None, None], threading.Barrier(2)

    def check(host: int) -> str | None:
        try:
            compare(host, Worker(host, said, barrier))
        except UsageError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(check, range(2)))


def test_another_number_of_examples_and_ids_numbered_otherwise_are_named_by_all():
    difference = "workers have different settings: {} of the train data {} at worker 0, {} at worker 1; give "
    for found in compared(split(1000), split(1300)):
        assert found.startswith(difference.format("examples", 1000, 1300))
    numbered = split(1000, ids="a b"), split(1000, ids="b a")
    for found in compared(*numbered):
        assert found.startswith(difference.format("ids", *(each["ids"] for each in numbered)))


def test_other_contents_of_as_many_examples_are_warned_of_once(caplog):
    """They may be another CPU's rounding."""
    with caplog.at_level("WARNING", logger="crankshaft"):
        assert compared(split(1000), split(1000)) == [None, None]
        assert not caplog.records
        assert compared(split(1000), split(1000, turned=True)) == [None, None]
    (record,) = caplog.records
    assert "workers have as many examples, of other contents" in record.getMessage()


X = np.linspace(0, 1, 64, dtype=np.float32)
WORDS = np.array([f"word {n}" for n in range(64)])


def lines(folder, files, of=slice(None)):
    for name in files:
        (folder / name).write_text(f"{name} 1\n{name} 2\n")
    return tf.data.TextLineDataset([str(folder / name) for name in files[of]])


def dataset(x, policy=None):
    options = tf.data.Options()
    if policy is not None:
        options.experimental_distribute.auto_shard_policy = policy
    return tf.data.Dataset.from_tensor_slices(x).with_options(options)


OFF = tf.data.experimental.AutoShardPolicy.OFF
# (of each of two workers, the policy, whether it would be divided once more)
DATA = {
    "arrays": (lambda host, _: (X[host::2], X[host::2]), "auto", True),
    "rounding": (lambda host, _: (X * (1 + 1e-6 * host), X), "auto", False),
    "shard": (lambda host, _: dataset(WORDS).shard(2, host), "auto", True),
    "shuffled, then shard": (lambda host, _: dataset(WORDS).shuffle(64, seed=1).shard(2, host), "auto", True),
    "half, then shuffled": (lambda host, _: dataset(WORDS[host::2]).shuffle(64), "auto", True),
    "files": (lambda host, folder: lines(folder, [*"abcd"], slice(host, None, 2)), "auto", True),
    "all files": (lambda host, folder: lines(folder, [*"abcd"]), "auto", False),
    "length": (lambda host, _: dataset(X).take(64 - host), "data", True),
    "rounded": (lambda host, _: dataset(X * (1 + 1e-6 * host)), "auto", False),
    "random": (lambda host, _: dataset(X).map(lambda x: x + tf.random.uniform([])), "auto", False),
    "shuffled": (lambda host, _: dataset(X).shuffle(64), "auto", False),
    "off": (lambda host, _: dataset(X, OFF).shard(2, host), "auto", False),
    "off, divided": (lambda host, _: dataset(X, OFF).shard(2, host), "data", True),
    "flag": (lambda host, _: dataset(X).shard(2, host), "off", False),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_workers_have_divided_is_not_divided_again(tmp_path, kind):
    data, policy, is_refused = DATA[kind]
    # The second reading of a shuffle has another order: what is compared must not depend on it.
    splits = [split_of(data(host, tmp_path)) for host in range(2)]
    next(iter(splits[0].examples(None, tf.constant(0, tf.int64)))) if not splits[0].by_index else None
    found = agreed(lambda host, worker: agreement.check_examples({"train": splits[host]}, worker, policy.upper()))
    for line in found:
        assert (line is not None) == is_refused
        assert line is None or "the train data of worker 1 differs from worker 0's" in line
        assert line is None or "AutoShardPolicy.OFF in its options or auto_shard_policy=off" in line


@pytest.mark.parametrize("holds", [True, False])
def test_a_lock_on_run_dir_that_does_not_hold_at_a_worker_is_named(tmp_path, caplog, holds):
    with locks.lock(str(tmp_path)) if holds else contextlib.nullcontext():  # the chief's
        assert agreed(lambda host, worker: agreement.check_run_dir(str(tmp_path), worker)) == [None, None]
    assert ("the chief's lock on it does not hold at worker 1" in caplog.text) != holds
