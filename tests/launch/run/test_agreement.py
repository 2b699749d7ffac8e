"""What workers say whose data differs, by what each has: two threads for two workers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import threading

import numpy as np

from crankshaft.engine.data.arrays import ArraySource
from crankshaft.launch.errors import UsageError
from crankshaft.launch.run import agreement, fingerprints
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

    def exchange_text(self, text: str) -> list[str]:
        self.said[self.host] = text
        self.barrier.wait(PATIENCE)
        found = list(self.said)
        self.barrier.wait(PATIENCE)
        return found

    def exchange(self, value: int) -> list[int]:
        return [json.loads(each) for each in self.exchange_text(json.dumps(value))]


def split(examples: int, turned: bool = False, ids=None) -> dict[str, int]:
    """The fingerprint of so many examples."""
    x = np.random.default_rng(0).random((examples, 3), np.float32)
    return fingerprints.fingerprint(ArraySource((x[::-1] if turned else x, x[:, 0])), examples, ids)


def compared(*train: dict[str, int]) -> list[str | None]:
    """What each of two workers says that have these splits to train on, and the same one to evaluate on."""
    said, barrier = [None, None], threading.Barrier(2)

    def check(host: int) -> str | None:
        try:
            agreement.check_data({"train": train[host], "eval": split(16)}, Worker(host, said, barrier))
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
