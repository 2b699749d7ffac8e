"""A `PyDataset` is Python code: what it returns is read again in each epoch, between the calls of its own methods."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import UsageError
from crankshaft.engine.data.order import plain_order
from crankshaft.engine.data.py_dataset import BatchSource
from crankshaft.engine.data.reader import Reader
from crankshaft.engine.strategies.parameter_server import sources
from tests import logical_cpus

BATCHES, SIZE = 5, 6
logical_cpus.make_four()
ASKED = {"global_batch_size": SIZE, "learning_rate": 0.05, "jit": "off", "progress": "off", "mode": "train"}
STREAMED = {"resident_data_mb": 0}
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


class Plane(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])

    def metrics(self, outputs, batch):
        return {"mean": crankshaft.mean(batch[1][:, 0])}


class Sampled(tf.keras.utils.PyDataset):
    """Returns another power of two each time that a batch is read; `log` has what was called."""

    def __init__(self, last: int = SIZE):
        super().__init__()
        self.log, self.last = [], last

    def __len__(self):
        return BATCHES

    def __getitem__(self, number):
        self.log.append(number)
        values = np.full([self.last if number == BATCHES - 1 else SIZE, 1], 2.0 ** len(self.log), np.float32)
        return values, values


class Shuffled(Sampled):
    """Samples by its own count of epochs, as one that is to be resumed has to."""

    epoch = 0

    def __getitem__(self, number):
        self.log.append(number)
        values = np.random.default_rng([self.epoch, number]).normal(size=[SIZE, 1]).astype("float32")
        return values, 2 * values

    def on_epoch_begin(self):
        self.log.append("begin")

    def on_epoch_end(self):
        self.log.append("end")
        self.epoch += 1


def means(data, where, epochs=3):
    with crankshaft.open_run(Plane, data=(data, None), **ASKED, **where) as run:
        return [run.train(epochs=1)["mean"] for _ in range(epochs)]


@pytest.mark.parametrize(
    ("where", "last"),
    [({}, SIZE), (STREAMED, 2), ({"shuffle_buffer": 0}, 2)],
    ids=["in memory", "too large", "its own order"],
)
def test_each_epoch_reads_each_batch_again(where, last):
    """Though all would fit into memory, and among the chunks that are kept."""
    data = Sampled(last)
    found = means(data, where)
    assert len({*found}) == 3
    assert min(map(data.log.count, range(BATCHES))) >= 3


@pytest.mark.parametrize("where", [TWO, {"global_batch_size": 4}], ids=["two", "uneven"])
def test_its_methods_are_called_around_each_epoch_and_nothing_is_read_outside(where):
    data = Shuffled()
    run = crankshaft.run(Plane, data=(data, None), **{**ASKED, **where}, train_epochs=3)
    epochs, of_form = "".join(map(str, data.log[3:])).split("begin"), data.log[:3]
    assert of_form == [0, 1, BATCHES - 1]
    assert [sorted(epoch.removesuffix("end")) for epoch in epochs] == [[], *([*"01234"] for _ in range(3))]
    assert all(epoch.endswith("end") for epoch in epochs[1:])
    assert run.result["step"] == 3 * -(-BATCHES * SIZE // where.get("global_batch_size", SIZE))


def test_a_run_that_is_resumed_within_an_epoch_calls_them_for_those_before(tmp_path):
    """So that the run ends with the bits of one that was not stopped."""
    asked = {**ASKED, **TWO}
    for steps in (BATCHES + 2, 3 * BATCHES):
        data = Shuffled()
        resumed = crankshaft.run(Plane, data=(data, None), **asked, run_dir=str(tmp_path / "run"), train_steps=steps)
    calls = [each for each in data.log if isinstance(each, str)]
    assert calls == ["begin", "end"] * 3
    straight = crankshaft.run(Plane, data=(Shuffled(), None), **asked, train_steps=3 * BATCHES)
    for mine, theirs in zip(resumed.model.get_weights(), straight.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_call_begins_and_ends_epochs_of_what_it_is_given_and_a_prediction_none_of_the_runs():
    data, given = Shuffled(), Shuffled()
    with crankshaft.open_run(Plane, data=(data, None), **ASKED) as run:
        run.train(steps=2)
        assert run.predict(split="train").shape == (BATCHES * SIZE, 1)
        assert [each for each in data.log if isinstance(each, str)] == ["begin"]
        run.train(data=given, epochs=2)
        run.evaluate(given)
    assert [each for each in given.log if isinstance(each, str)] == ["begin", "end"] * 3


def test_examples_are_not_split_off_where_its_methods_may_move_them():
    with pytest.raises(UsageError, match="on_epoch_begin or on_epoch_end, which may put others there"):
        crankshaft.run(Plane, data=(Shuffled(), None), **{**ASKED, "mode": "train_and_eval"}, validation_split=0.4)


def test_a_worker_with_servers_reads_each_epoch_again():
    """Here in this process: the function that a graph calls by name."""
    data = Sampled()
    source = BatchSource(data)
    order = plain_order(source, SIZE, 1, seed=3)
    own = sources.Sources(lambda: [source], "worker 0").answer()

    @tf.function(autograph=False)
    def values(step):
        indices, _ = order.examples_between(step, step + 1)
        return sources.read(source, 0, order, 0.0, indices, step)[0][0]

    epochs = [[values(tf.constant(step, tf.int64)) for step in range(BATCHES * n, BATCHES * (n + 1))] for n in (0, 1)]
    first, second = ({*np.concatenate(epoch).ravel().tolist()} for epoch in epochs)
    assert len(first) == len(second) == BATCHES
    assert not first & second
    del own


def test_a_chunk_of_constant_data_is_kept_from_epoch_to_epoch():
    class Constant(BatchSource):
        varies = False

    data = Sampled()
    source = Constant(data)
    order = plain_order(source, SIZE, BATCHES, seed=3)
    reader = Reader(source, order)
    for block in range(3):
        number = tf.constant(block, tf.int64)
        reader.read(order.examples(number), number)
    assert sorted(data.log) == [*range(BATCHES)]
