"""Data frames, lists and loaders train as the arrays that they hold, wherever a run takes data.

A `PyDataset` is Python code: what it returns is read again in each epoch, between the calls of its own methods.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.data import frames
from crankshaft.engine.data.entry import user_data
from crankshaft.engine.data.entry.py_dataset import BatchSource
from crankshaft.engine.data.order import plain_order
from crankshaft.engine.data.reader import Reader
from crankshaft.engine.errors import SourceError
from crankshaft.parts.parameter_servers import sources
from crankshaft.runner.failures import UsageError
from tests import logical_cpus
from tests.engine.trainers import Columns

pytestmark = pytest.mark.thorough

ROWS = 20
X = {"age": np.arange(ROWS) / 10.0, "score": np.arange(ROWS)[::-1] % 7, "place": np.array(["a", "bc"] * (ROWS // 2))}
Y = (np.arange(ROWS) % 3 == 0).astype(np.float32)
ASKED = {"global_batch_size": 5, "train_steps": 8, "progress": "off", "jit": "off"}


class Table(crankshaft.Trainer):
    """Two columns of numbers and the length of one of text."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        columns = [features["age"], features["score"], tf.strings.length(features["place"])]
        return self.model(tf.stack([tf.cast(each, tf.float32) for each in columns], 1), training=training)

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs[:, 0] - tf.cast(batch[1], tf.float32)))


class Loader:
    """What PyTorch's DataLoader has, without PyTorch."""

    def __init__(self, size: int, batches=None):
        self.dataset, self.batch_size, self.collate_fn, self.epochs = range(ROWS), size, None, 0
        self._batches = batches

    def __iter__(self) -> Iterator:
        self.epochs += 1
        for at in range(0, ROWS, self.batch_size):
            part = slice(at, at + self.batch_size)
            yield self._batches or [{name: column[part].tolist() for name, column in X.items()}, Y[part].astype(float)]


def weights(data, **more) -> np.ndarray:
    done = crankshaft.run(Table, data=data, **{**ASKED, **more})
    return np.concatenate([v.ravel() for v in done.model.get_weights()])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_is_a_dictionary_of_its_columns(library):
    module = pytest.importorskip(library)
    frame, labels = module.DataFrame(X), module.Series(Y)
    found, wanted = (user_data.split("train", split).as_arrays() for split in ((frame, labels), (X, Y)))
    tf.nest.map_structure(np.testing.assert_array_equal, found, wanted)
    with crankshaft.open_run(Table, data=((frame, labels), None), **ASKED) as run:
        run.train(data=(frame, labels), steps=2)
        assert run.evaluate((frame, labels)) == run.evaluate((X, Y))
        np.testing.assert_array_equal(run.predict(frame), run.predict(X))
        with pytest.raises(UsageError, match=r"given data: column 'score' lacks 1 of 20 values, the first in row 19"):
            run.evaluate((module.DataFrame({**X, "score": [*X["score"].tolist()[:-1], None]}), labels))


def test_lists_of_numbers_and_text_are_arrays():
    lists = {name: column.tolist() for name, column in X.items()}
    found, wanted = (user_data.split("train", split).as_arrays() for split in ((lists, Y.tolist()), (X, Y)))
    tf.nest.map_structure(np.testing.assert_array_equal, found, wanted)
    assert frames.as_arrays([[1, 2], [3, 4]]).shape == (2, 2)
    assert isinstance(frames.as_arrays([np.zeros(2), np.zeros(2)]), list)  # two inputs
    with pytest.raises(UsageError, match="train data: a list of lists that are not of one length"):
        user_data.split("train", ([[1, 2], [3]], Y))


LARGE = np.array([16_777_217.0, 3.0, 1e8 + 7] * 7)[:ROWS]


class Batches(tf.keras.utils.PyDataset):
    def __init__(self, of):
        super().__init__()
        self._of = of

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {name: column[10 * number : 10 * number + 10] for name, column in self._of.items()}, Y[:10]


@pytest.mark.parametrize("form", ["frame", "array", "matrix", "loader", "py_dataset", "labels"])
def test_ids_that_float32_would_round_are_one_line(form):
    """As pandas has made floats of them; what is float32, or has fractions, its user has rounded, or may be."""
    rounded = {**X, "age": LARGE}

    def read(x):
        if form == "frame":
            x = pytest.importorskip("pandas").DataFrame(x)
        if form in ("loader", "py_dataset"):
            x = Loader(5, [x, Y[:5]]) if form == "loader" else Batches(x)
            return user_data.split("train", x)
        if form == "matrix":
            return user_data.split("train", (np.stack([x["score"], x["age"]], 1), Y))
        return user_data.split("train", (X, x["age"]) if form == "labels" else (x, Y))

    error = SourceError if form in ("loader", "py_dataset") else UsageError
    with pytest.raises(
        error, match=r"float32 would make 16777216 of 16777217 in row 0; convert it by astype\('int64'\)"
    ):
        read(rounded)
    read({**X, "age": LARGE + np.where(np.arange(ROWS) == 4, 0.5, 0)})
    read({**X, "age": np.where(LARGE > 5, 2.0**40, LARGE)})
    if form != "matrix":
        for dtype in ("int64", "float32"):
            read({**X, "age": LARGE.astype(dtype)})


def test_a_loader_goes_on_where_a_run_ended_within_an_epoch(tmp_path):
    loader = Loader(6)  # ends in a batch of 2
    whole = weights((loader, None))
    assert loader.epochs >= 3
    for steps in (3, 8):
        parts = weights((Loader(6), None), train_steps=steps, run_dir=str(tmp_path / "run"))
    np.testing.assert_array_equal(parts, whole)
    with pytest.raises(UsageError, match="the Loader gives no batch of arrays; have its collate_fn return"):
        user_data.split("train", Loader(6, batches=(3, 4)))


def test_columns_of_a_frame_that_fit_has_trained_on_keep_their_names(tmp_path):
    module = pytest.importorskip("pandas")
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    frame = module.DataFrame({"b": np.arange(12, dtype=np.float32) / 5, "a": np.ones([12], np.float32)})
    crankshaft.fit(model, frame, Y[:12], epochs=1, verbose=0, run_dir=str(tmp_path / "run"))
    loaded, expected = crankshaft.load_model(tmp_path / "run"), model.predict(frame, verbose=0)
    for names in (["a", "b"], ["b", "a"]):
        np.testing.assert_allclose(loaded.predict(frame[names], verbose=0), expected, rtol=1e-6)
    with pytest.raises(UsageError, match=r"missing: b; unknown: c"):
        loaded.predict(frame.rename(columns={"b": "c"}), verbose=0)
    with pytest.raises(UsageError, match=r"in another order than this run was trained on, which is b, a"):
        crankshaft.fit(model, frame[["a", "b"]], Y[:12], epochs=2, verbose=0, run_dir=str(tmp_path / "run"))


def test_data_that_a_call_of_fits_run_is_given_is_as_fit_took_its_own():
    """Frames by their columns' names, and weights of outputs, of which a number for an example counts for each."""
    module = pytest.importorskip("pandas")
    inputs = tf.keras.Input([2])
    model = tf.keras.Model(inputs, {name: tf.keras.layers.Dense(1, name=name)(inputs) for name in "uv"})
    model.compile("sgd", {"u": "mse", "v": "mae"})
    frame = module.DataFrame({"b": np.arange(12, dtype=np.float32) / 5, "a": np.ones([12], np.float32)})
    y, w = {"u": Y[:12], "v": 2 * Y[:12]}, np.arange(12, dtype=np.float32)
    run = crankshaft.fit(model, frame, y, sample_weight={"u": w}, epochs=1, verbose=0, jit="off")
    weights = {"u": w, "v": np.ones([12], np.float32)}
    for data in ((frame.to_numpy(), y, weights), (frame[["a", "b"]], y, {"u": w}), (frame, y, w), (frame, y)):
        given = data[2] if len(data) == 3 else None
        weighed = {name: w if given is w else 1.0 + 0 * w if given is None else weights[name] for name in "uv"}
        expected = model.evaluate(frame.to_numpy(), y, sample_weight=weighed, verbose=0, return_dict=True)
        assert run.evaluate(data)["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    np.testing.assert_allclose(run.predict(frame[["a", "b"]])["u"], model.predict(frame.to_numpy(), verbose=0)["u"])
    with pytest.raises(UsageError, match="validation_data has the columns a, b, and x has b, a; give the same"):
        crankshaft.fit(model, frame, y, validation_data=(frame[["a", "b"]], y), epochs=1, verbose=0)


BATCHES, SIZE = 5, 6
logical_cpus.make_four()
PY_DATASET_RUN = {"global_batch_size": SIZE, "learning_rate": 0.05, "jit": "off", "progress": "off", "mode": "train"}
STREAMED = {"resident_data_mb": 0}
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


class Plane(Columns):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])

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
    with crankshaft.open_run(Plane, data=(data, None), **PY_DATASET_RUN, **where) as run:
        return [run.train(epochs=1)["mean"] for _ in range(epochs)]


@pytest.mark.parametrize(
    ("where", "last"),
    [pytest.param({}, SIZE, marks=pytest.mark.slow), (STREAMED, 2), ({"shuffle_buffer": 0}, 2)],
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
    run = crankshaft.run(Plane, data=(data, None), **{**PY_DATASET_RUN, **where}, train_epochs=3)
    epochs, of_form = "".join(map(str, data.log[3:])).split("begin"), data.log[:3]
    assert of_form == [0, 1, BATCHES - 1]
    assert [sorted(epoch.removesuffix("end")) for epoch in epochs] == [[], *([*"01234"] for _ in range(3))]
    assert all(epoch.endswith("end") for epoch in epochs[1:])
    assert run.result["step"] == 3 * -(-BATCHES * SIZE // where.get("global_batch_size", SIZE))


@pytest.mark.slow
def test_a_run_that_is_resumed_within_an_epoch_calls_them_for_those_before(tmp_path):
    """So that the run ends with the bits of one that was not stopped."""
    asked = PY_DATASET_RUN
    for steps in (BATCHES + 2, 3 * BATCHES):
        data = Shuffled()
        resumed = crankshaft.run(Plane, data=(data, None), **asked, run_dir=str(tmp_path / "run"), train_steps=steps)
    calls = [each for each in data.log if isinstance(each, str)]
    assert calls == ["begin", "end"] * 3
    straight = crankshaft.run(Plane, data=(Shuffled(), None), **asked, train_steps=3 * BATCHES)
    for mine, theirs in zip(resumed.model.get_weights(), straight.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_call_begins_and_ends_epochs_of_what_it_is_given_alone():
    data, given = Shuffled(), Shuffled()
    with crankshaft.open_run(Plane, data=(data, None), **PY_DATASET_RUN) as run:
        run.train(steps=2)
        assert run.predict(split="train").shape == (BATCHES * SIZE, 1)
        assert [each for each in data.log if isinstance(each, str)] == ["begin"]
        run.train(data=given, epochs=2)
        run.evaluate(given)
    assert [each for each in given.log if isinstance(each, str)] == ["begin", "end"] * 3


def test_examples_are_not_split_off_where_its_methods_may_move_them():
    with pytest.raises(UsageError, match="on_epoch_begin or on_epoch_end, which may put others there"):
        crankshaft.run(
            Plane, data=(Shuffled(), None), **{**PY_DATASET_RUN, "mode": "train_and_eval"}, validation_split=0.4
        )


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_that_are_passed_to_a_run_become_the_runs(dtype):
    x = np.linspace(-1, 1, 24).reshape(12, 2)
    y = x.sum(1, keepdims=True).astype("float32")
    origin = 1e6 if dtype == "float64" else 0  # of coordinates, which then lose digits as float32

    class Plane(Columns):
        def build_model(self):
            layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            return tf.keras.Sequential([tf.keras.Input([2]), layer])

        def forward(self, features, training):
            return self.model(tf.cast(features - origin, tf.float32), training=training)

    def dataset(dtype):
        return tf.data.Dataset.from_tensor_slices(((x + origin).astype(dtype), y)).batch(4)

    asked = {"global_batch_size": 4, "optimizer": "sgd", "jit": "off", "progress": "off", "mode": "train"}
    with crankshaft.open_run(Plane, data=(dataset(dtype),), **asked) as run:
        for other in ("float64", "float32"):
            error = 0.1 if other != dtype and origin else 1e-5
            arrays = (x + origin).astype(other), y.astype(other)
            for data, features in ((arrays, arrays[0]), (dataset(other), dataset(other))):
                np.testing.assert_allclose(run.predict(features), y, atol=error)
                assert run.evaluate(data)["loss"] <= error**2
                run.train(data=data, epochs=1)
                run.set_weights([np.ones([2, 1])])
        assert run.step == 12
