"""The order of examples as arithmetic: each once an epoch, and any step's batch the same however it is reached."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.order import ChunkedOrder, Order, Origin, PerWorkerOrder, even_range, replica_range
from crankshaft.engine.errors import UsageError

SIZES = [(1, 1), (1, 4), (3, 8), (8, 8), (12, 4), (13, 4), (29, 3), (64, 7)]


def batches(order, steps, first=0):
    """Examples of each step, found by its block alone."""
    blocks, found = {}, []
    for step in range(first, steps):
        block, offset, length = order.block_at(step)
        if block not in blocks:
            blocks[block] = order.examples(tf.constant(block, tf.int64)).numpy()
            assert len(order.epochs(tf.constant(block, tf.int64))) == len(blocks[block])
        assert offset < length <= len(blocks[block])
        found.append(blocks[block][offset].tolist())
    return found


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize(("examples", "batch_size"), SIZES)
def test_each_example_once_an_epoch_in_blocks_of_any_size(examples, batch_size, seed):
    reference = Order(examples, batch_size, 1, seed)
    steps = reference.steps_per_epoch
    assert steps == -(-examples // batch_size)
    of_epochs = batches(reference, 3 * steps)
    for epoch in range(3):
        epoch_batches = of_epochs[epoch * steps : (epoch + 1) * steps]
        assert [len(b) for b in epoch_batches[:-1]] == [batch_size] * (steps - 1)
        assert sorted(np.concatenate(epoch_batches).tolist()) == list(range(examples))
    for block_steps in (2, 5, 256):
        assert batches(Order(examples, batch_size, block_steps, seed), 3 * steps) == of_epochs


@pytest.mark.parametrize(
    ("examples", "block_steps", "lengths"),
    # 4 steps an epoch: parts of one, one, three, no more than eight; with a smaller last batch never more than one.
    [
        *[(12, 3, [3, 1, 3, 1]), (12, 4, [4, 4]), (12, 7, [4, 4]), (12, 14, [12, 12]), (12, 99, [32, 32])],
        (13, 14, [4, 1, 4, 1]),
    ],
)
def test_short_epochs_share_a_block(examples, block_steps, lengths):
    order = Order(examples, 3, block_steps, seed=1)
    firsts = np.cumsum([0, *lengths])
    assert [order.block_at(int(first)) for first in firsts[:-1]] == [(n, 0, k) for n, k in enumerate(lengths)]
    assert order.block_at(int(firsts[1]) - 1) == (0, lengths[0] - 1, lengths[0])
    for number, (first, length) in enumerate(zip(firsts, lengths, strict=False)):
        epochs = [step // order.steps_per_epoch for step in range(first, first + length)]
        assert order.epochs(tf.constant(number, tf.int64))[:length].numpy().tolist() == epochs


def test_epochs_and_seeds_differ_and_are_repeated_by_the_same_seed():
    one, again, other = (Order(200, 10, 4, seed) for seed in (1, 1, 2))
    assert batches(one, 40) == batches(again, 40)
    assert batches(one, 20) != batches(other, 20)
    assert batches(one, 40)[:20] != batches(one, 40)[20:]
    # A neighbouring seed's epochs are not this seed's next ones.
    assert batches(one, 40)[20:] != batches(other, 20)


def resumed(order, step, batch_size, origin):
    """The order for a run that was stopped before a step, in batches of another size."""
    return order.resumed({"resumed": {"step": step, "batch_size": batch_size, "origin": origin}})


@pytest.mark.parametrize("block_steps", [1, 3, 64])
@pytest.mark.parametrize(
    ("examples", "sizes"),
    # (batch size, up to which step), where an epoch ends.
    [
        (48, [(4, 12), (12, 20), (3, 60)]),
        (29, [(5, 6), (7, 16), (3, 36), (8, 50)]),
        (7, [(2, 4), (30, 6), (1, 40)]),
    ],
)
def test_another_batch_size_goes_on_where_an_epoch_ends(examples, sizes, block_steps):
    one_by_one = np.concatenate(batches(Order(examples, 1, 16, seed=5), 9 * examples)).tolist()
    first, before, origin, found = 0, sizes[0][0], Origin(), []
    for size, until in sizes:
        order = resumed(Order(examples, size, block_steps, seed=5), first, before, origin)
        new = batches(order, until, first)
        for step, batch in enumerate(new, first):
            assert divmod(len(found), examples) == order.position(step)
            at = tf.constant(step, tf.int64)
            assert order.examples_before(step) == len(found) == order.examples_before(at)
            # In steps of the first batch size, as many of an epoch's as of its examples.
            rate_step = len(found) * -(-examples // sizes[0][0]) // examples if first else step
            assert order.rate_step(step) == rate_step == order.rate_step(at)
            begins = next(later for later in itertools.count(step) if order.position(later)[1] == 0)
            assert order.epoch_from(step) == begins == order.epoch_from(at)
            assert order.examples_between(at, at + 1)[0].numpy().tolist() == batch
            assert order.examples_between(at, at + 1)[1] == len(found) // examples
            block, offset, _ = order.block_at(step)
            assert order.epochs(tf.constant(block, tf.int64))[offset] == len(found) // examples
            if order.remainder or block_steps < order.whole_steps:
                assert order.block_epoch(block) == len(found) // examples
            assert len(batch) == order.batch_size_at(step)
            found += batch
        assert {*map(len, new)} <= {size, examples % size}
        first, before, origin = until, size, order.origin
    assert len(found) > examples
    assert found == one_by_one[: len(found)]


def test_the_rate_goes_on_by_examples_also_where_products_are_large():
    order = resumed(Order(1 << 30, 4, 1), 1 << 29, 2, Origin())
    for step in (1 << 29, (1 << 40) + 5):
        assert order.rate_step(tf.constant(step, tf.int64)) == 2 * step - (1 << 29) == order.rate_step(step)


@pytest.mark.parametrize(("step", "epoch"), [(8, 2), (9, 3)], ids=["at an epoch's end", "within one"])
def test_other_examples_begin_an_epoch(step, epoch):
    saved = {"step": step, "batch_size": 10, "origin": Origin(), "num_examples": 40}
    order = Order(55, 10, 4, seed=5).resumed({"resumed": saved})
    assert order.position(step) == (epoch, 0)
    assert sorted(np.concatenate(batches(order, step + 6, step))) == [*range(55)]
    assert order.epoch_from(step + 1) == step + 6
    assert order.rate_step(step + 3) == step + 3
    assert resumed(Order(55, 10, 4, seed=5), step + 3, 10, order.origin) == order


def test_another_rule_of_the_order_goes_on_where_an_epoch_of_the_rule_before_ends():
    before, order = Order(10, 4, 1, drop_remainder=True), Order(10, 4, 1)
    order = order.resumed({"resumed": {"step": 4, "batch_size": 4, "origin": Origin()}}, before)
    assert order.origin == Origin(step=4, epoch=2, rate_step=4, rate_steps=2, rate_examples=8)
    assert [order.rate_step(step) for step in range(4, 9)] == [4, 5, 6, 6, 7]


@pytest.mark.parametrize("saved", [None, {}, {"counts": [48]}, {"resumed": {"step": 0, "batch_size": 6}}])
def test_a_run_that_begins_or_has_what_it_had_has_its_own_order(saved):
    order = Order(48, 4, 8)
    assert order.resumed(saved) == order
    assert order.origin == Origin(0, 0, 0, 0, 0)


@pytest.mark.parametrize(("step", "last"), [(1, 12), (11, 12), (13, 24)])
def test_within_an_epoch_the_batch_size_stays(step, last):
    line = rf"epoch {last // 12} began with global_batch_size=4, .* up to step {last}, where the epoch ends"
    with pytest.raises(UsageError, match=line):
        resumed(Order(48, 6, 8), step, 4, Origin())
    with pytest.raises(UsageError, match="resume with global_batch_size=4 again"):
        resumed(Order(48, 6, 8, has_epochs=False), step, 4, Origin())


def test_within_an_epoch_all_that_decides_its_order_stays():
    position = {"step": 1, "batch_size": 4, "origin": Origin(), "reordered": {"shuffle_window": 3, "bucket_by": None}}
    with pytest.raises(UsageError, match=r"^epoch 1 began with shuffle_window=3 and without bucket_by, and"):
        Order(48, 4, 8).resumed({"resumed": position})
    with pytest.raises(
        UsageError, match=r"; resume with global_batch_size=4 and with shuffle_window=3 and without bucket"
    ):
        Order(48, 6, 8).resumed({"resumed": position})


@pytest.mark.parametrize(
    ("shards", "replicas", "refused"),
    [
        *[((25, 25), 2, False), ((25, 20), 2, True), ((25, 21), 2, False), ((25, 21), 4, True), ((25, 22), 4, False)],
        ((120, 120), 40, True),  # more replicas than examples of a batch
    ],
)
def test_shares_of_files_that_end_before_others_forbid_sums_over_replicas(shards, replicas, refused):
    reason = PerWorkerOrder(sum(shards), 20, 1, shards=shards).no_exchange_reason(replicas)
    assert bool(reason) is refused
    assert f"({shards[0]}, {shards[1]} examples)" in reason or not refused


def test_shares_of_files_go_on_in_other_batches_where_an_epoch_ends():
    order = resumed(PerWorkerOrder(41, 6, 1, shards=(30, 11)), 15, 4, Origin())
    assert [order.batch_size_at(step) for step in range(15, 26)] == [6, 6, 6, 5, *[3] * 6, 6]
    assert order.examples_before(15) == 41


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_examples_before_a_step_are_those_of_the_batches_before_it(drop_remainder):
    order = Order(10, 4, 2, drop_remainder=drop_remainder)
    sizes = [4, 4] if drop_remainder else [4, 4, 2]
    assert [order.examples_before(step) for step in range(8)] == np.cumsum([0, *(3 * sizes + [4])])[:8].tolist()


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        (Order(20, 5, 4), [[5]] * 4),
        (Order(22, 5, 4), [[5]] * 4 + [[2]]),
        (Order(22, 5, 4, drop_remainder=True), [[5]] * 4),
        (Order(3, 5, 4), [[3]]),
        (PerWorkerOrder(50, 20, 1, shards=(25, 25)), [[10, 10]] * 2 + [[5, 5]]),
        (PerWorkerOrder(50, 20, 1, shards=(40, 10)), [[10, 10]] + [[10, 0]] * 3),
        (PerWorkerOrder(50, 20, 1, shards=(0, 50)), [[0, 10]] * 5),
        (PerWorkerOrder(45, 20, 1, shards=(32, 13)), [[10, 10], [10, 3], [10, 0], [2, 0]]),
    ],
)
def test_steps_of_equal_size_end_where_a_worker_has_other_than_it_had(order, rows):
    """`rows` are the examples of each worker at each step of an epoch."""
    assert order.steps_per_epoch == len(rows)
    for step in range(2 * len(rows)):
        later = [rows[offset % len(rows)] != rows[step % len(rows)] for offset in range(step, step + len(rows))]
        assert order.steps_of_equal_size(step) == (later.index(True) if True in later else math.inf)


def test_without_a_seed_the_order_is_the_examples_own_in_every_epoch():
    order = Order(10, 4, 2)
    assert batches(order, 6) == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_dropped_remainder_leaves_whole_batches_of_other_examples_each_epoch():
    order = Order(10, 4, 3, seed=0, drop_remainder=True)
    assert order.steps_per_epoch == 2
    of_steps = batches(order, 10)
    for epoch in range(5):
        seen = np.concatenate(of_steps[2 * epoch : 2 * epoch + 2])
        assert len(set(seen.tolist())) == 8
    left_out = {frozenset(range(10)) - {*np.concatenate(of_steps[i : i + 2])} for i in range(0, 10, 2)}
    assert len(left_out) > 1


def test_data_that_makes_no_batch_is_refused():
    with pytest.raises(ValueError, match="num_examples=0"):
        Order(0, 4, 1)
    with pytest.raises(ValueError, match="no whole batch of batch_size=4"):
        Order(3, 4, 1, drop_remainder=True)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 64])
def test_replicas_share_a_batch_evenly(size, replicas):
    shares = [even_range(size, replica, replicas) for replica in range(replicas)]
    whole = [replica_range(size, replica, replicas) for replica in range(replicas)]
    assert whole == (shares if size >= replicas else [(0, size)] * replicas)
    assert whole == [tuple(map(int, replica_range(tf.constant(size), i, replicas))) for i in range(replicas)]
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == size
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


def epochs(examples, num_epochs, seed=0, batch_size=None):
    """[num_epochs, order index] the examples of each epoch in order; with a batch size, of its first batch alone."""
    order = Order(examples, batch_size or examples, 1, seed)
    blocks = tf.data.Dataset.range(0, num_epochs * order.blocks_per_epoch, order.blocks_per_epoch)
    return np.stack([*blocks.map(order.examples, tf.data.AUTOTUNE).map(lambda rows: rows[0]).as_numpy_iterator()])


def spread(table, expected):
    """How many standard deviations a table's chi-square is from its mean, where `expected` is in each cell."""
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return (np.sum((table - expected) ** 2 / expected) - freedom) / np.sqrt(2 * freedom)


SHUFFLED = [64, 1437, 60_000, 65_537]  # the cipher has 16 bits up to 65,536, more from there


@pytest.mark.parametrize("examples", SHUFFLED)
def test_neighbouring_epochs_and_seeds_have_nothing_in_common(examples):
    """Correlations of random orders have a standard deviation of 1/sqrt(examples - 1)."""
    orders = [*epochs(examples, 6, seed=0), *epochs(examples, 2, seed=1), *epochs(examples, 1, seed=2)]
    for one in range(len(orders)):
        for other in range(one):
            correlation = np.corrcoef(orders[one], orders[other])[0, 1]
            assert abs(correlation) * np.sqrt(examples - 1) < 4.5, (one, other)


@pytest.mark.parametrize("examples", SHUFFLED)
def test_an_example_may_stand_anywhere_and_anywhere_else_in_the_next_epoch(examples):
    """Chi-squares of index by example, and of index by index in the next epoch, both in 32 equal parts."""
    orders = epochs(examples, 1001 if examples == 64 else 5)
    part = 32 * np.arange(examples) // examples
    offsets = np.argsort(orders, axis=1)
    sizes = np.bincount(part)
    expected = np.outer(sizes, sizes) / examples * (len(orders) - 1)
    by_example, by_index = np.zeros([2, 32, 32])
    for before, after in itertools.pairwise(offsets):
        np.add.at(by_example, (part, part[before]), 1)
        np.add.at(by_index, (part[before], part[after]), 1)
    for table in (by_example, by_index):
        assert abs(spread(table, expected)) < 4.5


@pytest.mark.parametrize("examples", SHUFFLED)
def test_batches_of_sorted_data_have_classes_as_by_chance(examples):
    """Of ten classes, one after the other: the count in a batch has the hypergeometric variance."""
    batch_size, orders = 16, epochs(examples, 200 if examples < 10_000 else 3)
    batches = orders[:, : examples // batch_size * batch_size].reshape(-1, batch_size)
    a_class = examples // 10
    counts = np.sum(batches < a_class, axis=1)
    share = a_class / examples
    variance = batch_size * share * (1 - share) * (examples - batch_size) / (examples - 1)
    # A variance of so many counts, whose fourth moment is about three times the variance's square, more for rare ones.
    error = np.sqrt((2 + 1 / variance) / len(counts))
    assert abs(counts.var() / variance - 1) < 4.5 * error
    assert counts.max() <= batch_size * share + 7 * np.sqrt(variance) + 1


@pytest.mark.parametrize("examples", SHUFFLED)
def test_those_of_a_batch_meet_again_in_the_next_epoch_as_by_chance(examples):
    batch_size, orders = 16, epochs(examples, 100 if examples < 10_000 else 4)
    batches = examples // batch_size
    met, pairs = 0, batches * batch_size * (batch_size - 1) / 2
    for before, after in itertools.pairwise(np.argsort(orders, axis=1) // batch_size):
        whole = (before < batches) & (after < batches)
        together = np.bincount(before[whole] * batches + after[whole])
        met += np.sum(together * (together - 1) // 2)
    expected = (len(orders) - 1) * pairs * (batches * batch_size * (batch_size - 1)) / (examples * (examples - 1))
    assert abs(met - expected) < 4.5 * np.sqrt(expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("examples", "batch_size"),
    [pytest.param(64, 8, marks=pytest.mark.slow), (1437, 32), pytest.param(65_536, 32, marks=pytest.mark.slow)],
)
def test_ten_thousand_epochs_and_seeds_have_no_period(examples, batch_size):
    """Up to 2^16 examples there are 2^24 keys: of 10,000, three pairs are expected to be the same by chance."""
    first_batches = epochs(examples, 10_000, batch_size=batch_size)
    assert len(np.unique(first_batches, axis=0)) > 9_990
    seeds = [batches(Order(examples, batch_size, 1, seed), 1)[0] for seed in (*range(40), *range(256, 296), 2**31 - 1)]
    assert len(np.unique(seeds, axis=0)) == len(seeds)


@pytest.mark.parametrize(
    ("order", "begins"),
    [
        (Order(10, 8, 1, 7), [[4, 1, 6, 0, 7, 8, 2, 9], [9, 8, 0, 6, 1, 7, 3, 4]]),
        (Order(100_000, 8, 1, 7), [[27384, 98686, 52722, 50819, 81134, 13561, 5872, 57494]]),
        (
            ChunkedOrder(25, 12, 1, 7, chunk_examples=2, window_chunks=3),
            [[21, 3, 20, 24, 12, 2, 14, 13, 15, 1, 0, 16], [16, 1, 17, 20, 21, 0, 14, 13, 15, 23, 12, 22]],
        ),
    ],
)
def test_an_order_stays_what_it_is(order, begins):
    """Another is another rule: `engine.state.RULES` counts them, so that no run of this one is gone on with."""
    firsts = tf.range(len(begins), dtype=tf.int64) * order.blocks_per_epoch
    assert [order.examples(block)[0].numpy().tolist() for block in firsts] == begins
