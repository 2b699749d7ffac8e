"""Two and three processes train what one device trains: the same examples, the same sums, the same decisions."""

import collections
import itertools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.strategies import StrategyOptions
from crankshaft.engine.strategies.replicated import Replicated
from tests.distributed import worker

WORKER = pathlib.Path(worker.__file__)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def folder(request, tmp_path_factory, start_workers):
    """Where two workers, and three, have put what they found."""
    folder = tmp_path_factory.mktemp("found")
    first = 1
    for number, lines in enumerate(worker.LINES):
        (folder / f"ids-{number}").write_text("".join(f"{first + line}\n" for line in range(lines)))
        first += lines
    worker.write_files(folder)
    start_workers(request.param, WORKER, folder).ok()
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What each worker has written down."""
    return [
        json.loads((folder / f"found-{index}.json").read_text()) for index in range(len(list(folder.glob("found*"))))
    ]


@pytest.fixture(scope="module")
def board(folder):
    """The tags in the event files of the run's training."""
    return {
        value.tag
        for path in (folder / "tensorboard" / "train").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


EXACT = ["resident", "streamed", "dataset auto", "files data"]
FEEDS = [*EXACT, "files auto", "files file", "source", "source by chunks"]


def joined(found, kind) -> list[list[int]]:
    """The global batches: the workers' shares one after the other; all of one of fewer examples than workers."""
    parts = zip(*(each["feeds"][kind] for each in found), strict=True)
    return [
        batch[0]
        if batch[0] and len(batch[0]) < len(batch) and all(part == batch[0] for part in batch)
        else [example for part in batch for example in part]
        for batch in map(list, parts)
    ]


@pytest.mark.parametrize("kind", FEEDS)
def test_each_example_of_an_epoch_is_seen_once_over_all_workers(found, kind):
    batches = joined(found, kind)
    steps = len(batches) // worker.EPOCHS
    for epoch in range(worker.EPOCHS):
        counts = collections.Counter(itertools.chain(*batches[epoch * steps : (epoch + 1) * steps]))
        assert counts == dict.fromkeys(range(1, worker.EXAMPLES + 1), 1)


@pytest.mark.parametrize("kind", EXACT)
def test_a_step_s_batch_does_not_depend_on_how_many_workers_there_are(found, folder, kind):
    """The workers' shares, one after the other, are the batch that one device would have been given."""
    source, options = worker.sources(folder)[kind]
    one = worker.seen(
        Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"), StrategyOptions(feed_options=options)),
        source,
    )
    assert joined(found, kind) == one


@pytest.mark.parametrize("kind", ["files file", "files auto"])
def test_files_are_divided_whole(found, kind):
    """By FILE, and by AUTO where there are enough, each worker reads files of its own, all of each."""
    starts = np.cumsum([0, *worker.LINES])
    of_file = [set(range(start + 1, end + 1)) for start, end in itertools.pairwise(starts)]
    for each in found:
        mine = {example for batch in each["feeds"][kind] for example in batch}
        assert mine == set().union(*(ids for ids in of_file if ids & mine))


def test_an_evaluation_counts_each_example_once_on_all_workers(found):
    ids = np.arange(1, worker.EVAL_EXAMPLES + 1)
    above, below = (ids[ids % 2 == label] % 7 for label in (1, 0))
    auc = np.mean((above[:, None] > below) + 0.5 * (above[:, None] == below))
    exact = {"loss": [ids.sum(), len(ids)], "square": [(ids**2).sum(), len(ids)], "auc": pytest.approx(auc, abs=1e-12)}
    assert [each["evaluations"] for each in found] == [[exact] * 4] * len(found)  # twice arrays, twice files


def test_workers_learn_each_other_s_values_in_order(found):
    assert all(each["exchanged"] == [10**12 + i for i in range(len(found))] for each in found)


def test_sums_are_those_of_all_workers_and_the_same_bits_on_each(found):
    """Each sum of float32 rounds by half a unit of 2^-23 of what it has by then, at most."""
    for size, mine in found[0]["crossed"].items():
        assert [each["crossed"][size] for each in found] == [mine] * len(found)
        assert mine["gathered"]
        assert mine["error"] <= (len(found) - 1) * 2**-24


def test_workers_learn_what_one_device_learns(found):
    """100 steps of Adam at its usual rate, within 1e-5: float32 sums in another order, 1e-7 a step."""
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"))
    one = worker.curve(strategy, worker.Cnn(), 100)
    assert np.mean(one[-10:]) < 0.7 * np.mean(one[:10])
    for each in found:
        np.testing.assert_allclose(each["cnn"], one, rtol=1e-5)


def test_workers_that_sum_and_gather_in_a_step_learn_what_one_device_learns(found):
    """Statistics of 12 examples and of 1, in 50 steps of 22 an epoch."""
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"))
    one = worker.centred(strategy)
    for each in found:
        np.testing.assert_allclose(each["centred"], one, rtol=1e-4, atol=1e-5)


def test_all_workers_take_as_many_steps_a_call_and_stop_at_the_same_one(found):
    """One worker's wish is known to all after the same call, by its worker's name; none of them has to wait for it."""
    calls = found[0]["agreement"]
    assert all(each["agreement"] == calls for each in found)
    stops = [stop for _, stop in calls]
    last = f"SIGTERM at worker {len(found) - 1}"
    # Told with the fourth call, read after the fifth, known when the sixth is asked for.
    assert stops == [None] * 5 + [last] * 5


def test_a_slow_worker_is_named_and_its_time_is_its_own(found):
    """The last one sleeps 100 ms a step; the others wait for it as long, and that is not theirs."""
    *fast, slow = found[0]["slow"]["figures"]
    assert slow["own_ms"] > 100
    for each in fast:  # a busy machine adds to all of them, so only the order is sure
        assert each["own_ms"] < slow["own_ms"]
        assert each["reduce_wait_ms"] > slow["reduce_wait_ms"]
        assert each["step_ms"] > 100 * 39 / 40  # none is ahead of the slow one by more than a step of 40
    assert {line.split(" is slow")[0].split(": ")[1] for line in found[0]["slow"]["warnings"]} == {
        f"worker {len(found) - 1}"
    }


def test_a_worker_s_own_gradient_norm_is_that_of_its_own_examples(found):
    norms = [each["gradient_norm"] for each in found[0]["slow"]["figures"]]
    assert all(norm > 0 for norm in norms)
    assert len(set(norms)) == len(norms)


def test_each_worker_has_its_figures_in_the_chief_s_tensorboard(board, found):
    tags = {f"workers/{index}/{name}" for index in range(len(found)) for name in found[0]["slow"]["figures"][0]}
    assert tags <= board


def test_a_copy_that_differs_by_one_bit_is_named_on_all_workers(found):
    last = len(found) - 1
    for each in found:
        assert f"replica {last} (worker {last}) of {len(found)} replicas holds other values of" in each["out of step"]
        assert "bias [32]" in each["out of step"]


def test_variables_made_of_a_worker_s_own_numbers_are_the_first_worker_s(found):
    first, scalar, second = found[0]["own numbers"]
    assert second == [2 * value for value in first]
    assert all(each["own numbers"] == [first, scalar, second] for each in found)
