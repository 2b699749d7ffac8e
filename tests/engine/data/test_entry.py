"""What users pass becomes a source or a stream of the same examples, whatever its form, and with the same weights."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Data
from crankshaft.engine.data.arrays import ArraySource, Mapped, as_tensor, wrap
from crankshaft.engine.data.entry import user_data, views
from crankshaft.engine.data.form import Padded, Unmeasured, WeighedLabels, fields
from crankshaft.engine.data.form import classes as classes_of
from crankshaft.engine.data.frames import as_arrays
from crankshaft.engine.data.reader import in_pieces
from crankshaft.engine.data.source import Source, Spec
from crankshaft.engine.data.streamed import FileStream
from crankshaft.engine.errors import CrankshaftError, UsageError
from tests.arrays import assert_same
from tests.processes import assert_says

N = 10
X = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
Y = np.arange(N) % 3
W = np.linspace(0.5, 2, N, dtype=np.float32)
AS_KERAS = user_data.Rules(as_keras=True, weighs_outputs=True)


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return -(-N // 4)

    def __getitem__(self, number):
        return tuple(tf.nest.map_structure(lambda x: x[4 * number : 4 * number + 4], self.parts))


class Loader:
    """What PyTorch's DataLoader has, without PyTorch."""

    def __init__(self, *parts):
        self.dataset, self.batch_size, self.collate_fn, self.parts = range(N), 4, None, parts

    def __iter__(self):
        for at in range(0, N, 4):
            yield tuple(part[at : at + 4] for part in self.parts)


class MapDataset:
    """What Grain's datasets have, without Grain: `batch` makes another kind."""

    __module__ = "grain.dataset"

    def __init__(self, *inputs):
        self._parents = inputs

    def __iter__(self):
        return iter(Loader(X, Y))


class BatchMapDataset(MapDataset):
    pass


class FlatMapMapDataset(MapDataset):
    pass


class Rows(Source):
    """Examples that are read as a run goes."""

    def __init__(self, *parts):
        self.parts = parts
        self.element_spec = tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), parts)

    def __len__(self):
        return N

    def read(self, indices):
        return tf.nest.map_structure(lambda x: x[indices], self.parts)


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


def stream(*parts):
    return FileStream(["some"], lambda path: dataset(*parts))


FORMS = {
    "arrays": lambda *parts: parts,
    "lists": lambda *parts: [part.tolist() for part in parts],
    "tensors": lambda *parts: tuple(map(tf.constant, parts)),
    "array source": lambda *parts: ArraySource(parts),
    "source": Rows,
    "examples": dataset,
    "batches": lambda *parts: dataset(*parts).batch(4),
    "PyDataset": Batches,
    "loader": Loader,
    "stream": stream,
}


def all_of(split):
    """All examples of a split, as its run reads them."""
    if not split.by_index:
        rows = [*split.examples(None, tf.constant(0, tf.int64)).batch(N)]
        return tf.nest.map_structure(lambda x: x.numpy(), rows[0])
    stored = tf.nest.map_structure(tf.constant, split.read(np.arange(len(split))))
    return tf.nest.map_structure(np.asarray, split.decode(stored, tf.zeros([len(split), 2], tf.int64)))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_same_examples_weights_and_views(form):
    entered = user_data.split("train", FORMS[form](X, Y, W))
    assert_same(all_of(entered), (X, Y, W))
    for found, wanted in zip(all_of(views.first(entered, 7)), (X, Y, W), strict=True):
        np.testing.assert_array_equal(found, wanted[:7])
    weighed = user_data.enter(Data(FORMS[form](X, Y), class_weight={0: 2e-8, 2: 1 / 227429}))[0].train
    np.testing.assert_array_equal(all_of(weighed)[2], np.choose(Y, [2e-8, 1.0, 1 / 227429]).astype(np.float32))
    again = user_data.split("train", weighed)
    assert again.element_spec == weighed.element_spec


def halved(x):
    x = x[0] if isinstance(x, tuple) else x
    return {"half": x[:, :1] / 2}


def doubled(x):
    x = x[0] if isinstance(x, tuple) else x
    return x, 2 * x


def spec_of(nest):
    return tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), nest)


@pytest.mark.parametrize("form", ["array source", "source", "examples", "stream"])
@pytest.mark.parametrize("parts", [(X,), (X, Y), (X, Y, W), ((X, Y),), ((X, Y), W[:, None])], ids=range(5))
@pytest.mark.parametrize("convert", [halved, doubled])
def test_features_are_converted_and_all_else_stays(form, parts, convert):
    split = user_data.split("train", FORMS[form](*parts))
    converted = convert(X)
    alone = (converted,) if isinstance(converted, tuple) else converted
    for found, wanted in (
        (views.with_features(split, convert), (converted, *parts[1:]) if parts[1:] else alone),
        (views.features(split, convert), alone),
    ):
        tf.nest.map_structure(np.testing.assert_array_equal, all_of(found), wanted)
        assert found.element_spec == spec_of(wanted)


@pytest.mark.parametrize("form", ["arrays", "source", "examples"])
@pytest.mark.parametrize("parts", [(X,), (X, Y), (X, W), (X, W, W)], ids=["x", "classes", "numbers", "weights"])
def test_floats_become_those_that_a_run_has(form, parts):
    """In features and labels, not in weights; whole numbers stay."""

    def with_floats(dtype):
        return tuple(x.astype(dtype) if at < 2 and x is not Y else x for at, x in enumerate(parts))

    given = with_floats(np.float64)
    split = user_data.split("given", FORMS[form](*given), user_data.Rules(keeps_float64=True))
    wanted = with_floats(np.float16)
    like = views.with_floats_like(split, spec_of(wanted))
    for found, part in zip(fields(all_of(like)), wanted, strict=False):
        np.testing.assert_array_equal(found, part)
    assert fields(like.element_spec) == fields(spec_of(wanted))
    assert views.with_floats_like(like, spec_of(wanted)) is like
    assert views.with_floats_like(split, spec_of(({"x": X}, Y))) is split


def test_batches_of_one_size_are_told_from_others_as_they_are_read():
    rules = user_data.Rules(as_keras=True, is_even=True)
    wide = np.repeat(X, 4, 1)  # of more columns than a batch has rows
    for parts in ((X,), (X, Y), (wide, Y)):
        examples = tf.data.Dataset.from_tensor_slices(parts if parts[1:] else X)
        for size in (4, 5):
            assert_same(fields(all_of(user_data.split("x", examples.batch(size), rules))), fields(parts))
        for size in (3, 6):
            uneven = examples.take(4).batch(4).concatenate(examples.skip(4).batch(size))
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="has batches of 4 examples and, before its end, of"
            ):
                all_of(user_data.split("x", uneven, rules))


def test_grain_datasets_that_show_batches_have_their_examples():
    """And all have in Keras's `fit`, which takes each element for a batch."""
    for data, rules in ((MapDataset(BatchMapDataset(MapDataset())), None), (MapDataset(), AS_KERAS)):
        assert_same(all_of(user_data.split("train", data, rules)), (X, Y))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("lists", "tensors", "loader")])
def test_weights_of_outputs_are_part_of_the_labels_and_whole_ones_count_for_each(form):
    labels = {"a": Y, "b": Y[:, None]}
    entered, _ = user_data.enter(
        Data(FORMS[form](X, labels, {"a": W, "b": 2 * W}), FORMS[form](X, labels, 3 * W)), weighs_outputs=True
    )
    for split, times in ((entered.train, (1, 2)), (entered.evaluation, (3, 3))):
        found = fields(all_of(split))
        assert isinstance(found.labels, WeighedLabels)
        assert found.weights is None
        for name, factor in zip("ab", times, strict=True):
            np.testing.assert_allclose(found.labels.weights[name], factor * W)
            np.testing.assert_array_equal(found.labels.labels[name], labels[name])
    with pytest.raises(UsageError, match="the weights of the train data, its third part, are a dict"):
        user_data.enter(Data(FORMS[form](X, labels, {"a": W, "b": W})))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("examples", "stream", "source")])
def test_as_keras_takes_them_batches_keep_their_size(form):
    data = FORMS[form](X, Y)
    entered = user_data.split("x", data, AS_KERAS)
    assert entered.batch_examples == (4 if form in ("batches", "PyDataset", "loader") else None)
    np.testing.assert_array_equal(all_of(entered)[0], X)


@pytest.mark.parametrize("form", ["arrays", "lists", "source", "PyDataset"])
def test_the_last_examples_are_split_off_by_kerass_rule(form):
    """Without weights of their classes."""
    entered, _ = user_data.enter(Data(FORMS[form](X, Y), class_weight={0: 0.5}), validation_split=0.25)
    assert (len(entered.train), len(entered.evaluation)) == (7, 3)
    np.testing.assert_array_equal(all_of(entered.evaluation)[0], X[7:])
    assert fields(entered.train.element_spec).weights
    assert fields(entered.evaluation.element_spec).weights is None


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array([3, 0, 3, -1]), {0, 3}),
        (np.eye(3, dtype="float32")[[0, 2, 2]], {0, 2}),
        (np.array([[1.0], [0.0]]), {0, 1}),
        (np.ones([2, 5], "int32"), None),  # one per step
        ({"a": Y, "b": Y}, None),
    ],
)
def test_classes_are_those_of_labels_one_per_example(labels, classes):
    examples = len(tf.nest.flatten(labels)[0])
    assert classes_of(ArraySource((np.ones(examples), labels))) == classes


def read_in_graph(split):
    """All examples, as a step gets them."""
    return next(in_pieces(split, 0, N)) if split.by_index else all_of(split)


@pytest.mark.parametrize("dtype", [">f8", ">i2"])
@pytest.mark.parametrize("form", ["arrays", "file", "source", "PyDataset", "loader", "generator"])
def test_numbers_in_another_byte_order_are_those_that_numpy_reads(tmp_path, form, dtype):
    x, y = X.astype(dtype), Y.astype(">i4")
    if form == "file":
        np.save(tmp_path / "x.npy", x)
        data = (np.load(tmp_path / "x.npy", mmap_mode="r"), y)
    else:
        data = (pair for pair in Loader(x, y)) if form == "generator" else FORMS[form](x, y)
    split = user_data.split("train", data, user_data.Rules(as_keras=form == "generator", ends=True))
    found = read_in_graph(split)
    assert_same(found, (X, Y))
    wanted = "float64" if form == "source" else "float32"  # a source says what it wants
    assert [part.dtype.name for part in found] == [wanted if dtype == ">f8" else "int16", "int32"]


class Slices:
    """Rows in a file, as HDF5's and Zarr's: they have a shape and a type, and are read by slices alone."""

    def __init__(self, array):
        self._array, self.shape, self.dtype, self.most = array, array.shape, array.dtype, 0

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        self.most = max(self.most, len(self._array[rows]))
        return self._array[rows]


@pytest.mark.parametrize("dtype", ["datetime64[D]", "timedelta64[s]", "longdouble", [("a", "f4"), ("b", "f4")], object])
def test_arrays_that_tensorflow_does_not_take_are_refused_by_a_line_to_train_and_to_predict(dtype):
    strange = np.zeros(8, dtype)
    for enters in (
        lambda: user_data.split("given", (strange, Y[:8])),
        lambda: user_data.features(strange, user_data.Rules()),
    ):
        with pytest.raises(UsageError, match="the given data has an array of"):
            enters()


def test_a_memoryview_is_an_array():
    for entered in (user_data.split("train", (memoryview(X), Y)), user_data.features(memoryview(X), user_data.Rules())):
        read = entered.read(np.array([2, 0]))
        np.testing.assert_array_equal(read[0] if isinstance(read, tuple) else read, X[[2, 0]])


def test_whatever_has_rows_is_read_by_rows():
    x, y = Slices(X.astype(">f8")), Slices(Y)
    train, evaluation = views.divided(user_data.split("train", (x, y)), 0.3)
    predicted = user_data.features(x, user_data.Rules())
    for split, wanted in ((train, X[:7]), (evaluation, X[7:])):
        for at in ([2, 0, 1, 1], [0], []):
            np.testing.assert_array_equal(split.read(np.array(at, np.int64))[0], wanted[at])
    np.testing.assert_array_equal(predicted.read(np.array([9, 3, 4])), X[[9, 3, 4]])
    assert x.most == 3
    for form in (train.as_arrays()[0][:], as_tensor(train.as_arrays()[0])):
        np.testing.assert_array_equal(form, X[:7])
        assert np.asarray(form).dtype == np.float32


@pytest.mark.parametrize("parts", [(X, Y[:9]), (X[:9], Y), (X, Y, W[:9]), ({"a": X, "b": X[:9]}, Y)], ids=len)
def test_a_batch_whose_arrays_differ_in_length_is_named(parts):
    with pytest.raises(CrankshaftError, match=r"Batches\[2\] is a batch with arrays of (2, 1|1, 2) examples; make"):
        user_data.split("train", FORMS["PyDataset"](*parts))


def test_values_that_an_array_masks_are_missing():
    x = np.ma.array(X, mask=X == 5)
    for data in ((x, Y), (Slices(x), Y), *(FORMS[form](x, Y) for form in ("PyDataset", "source", "loader"))):
        with pytest.raises(CrankshaftError, match=r"masked array lacks 1 of (20|8) values, the first in row 2; fill"):
            read_in_graph(user_data.split("train", data))
    whole = user_data.split("train", (np.ma.array(X, mask=False), Y))
    np.testing.assert_array_equal(all_of(whole)[0], X)
    filled = as_arrays({"x": x, "n": np.ma.array(Y, mask=Y == 1)}, may_lack=True)
    assert np.isnan(filled["x"][2, 1])
    assert filled["n"].tolist() == ["" if y == 1 else y for y in Y]


def test_a_file_is_divided_without_a_copy(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = Data((np.load(tmp_path / "x.npy", mmap_mode="r"), Y))
    entered, _ = user_data.enter(mapped, validation_split=0.25)
    for split, wanted in ((entered.train, X[:7]), (entered.evaluation, X[7:])):
        assert isinstance(split.as_arrays()[0], Mapped)
        np.testing.assert_array_equal(split.as_arrays()[0], wanted)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float64"])
def test_integers_and_booleans_are_weights(dtype):
    weights = user_data.split("train", (X, Y, (Y > 0).astype(dtype))).as_arrays()[2]
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, Y > 0)


@pytest.mark.parametrize("parts", [(X,), (X, Y)], ids=["features", "labels"])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_are_taken_apart_with_a_note(parts, drop_remainder):
    notes: list[str] = []
    batches = dataset(*parts) if len(parts) > 1 else tf.data.Dataset.from_tensor_slices(X)
    entered = user_data.split("train", batches.batch(5, drop_remainder), notes=notes)
    np.testing.assert_array_equal(fields(all_of(entered)).features, X)
    assert notes[0].startswith("the train dataset comes in batches: it is unbatched")
    user_data.split("train", batches, notes=notes)
    assert len(notes) == 1


def test_numbers_alone_are_examples_wherever_they_are_from():
    notes: list[str] = []
    numbers = tf.data.Dataset.from_generator(lambda: iter(range(4)), output_signature=tf.TensorSpec([], tf.int64))
    assert [int(x) for x in user_data.split("train", numbers, notes=notes).examples(None, 0)] == [0, 1, 2, 3]
    assert not notes


@pytest.mark.parametrize("rules", [AS_KERAS, user_data.Rules()])
def test_batches_whose_operations_show_their_form_are_not_read_for_it(rules):
    """A generator that counts how often it is started, such as for a curriculum."""
    starts = []

    def generate():
        starts.append(1)
        yield from X

    examples = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([2], tf.float32))
    batches = examples.apply(tf.data.experimental.assert_cardinality(N)).map(lambda x: (x, x)).batch(4).prefetch(1)
    entered = user_data.split("x", batches, rules)
    assert (entered.length, starts) == (N, [])
    assert entered.batch_examples == (4 if rules is AS_KERAS else None)


def test_weights_that_are_none_are_ones():
    weighed = dataset(X, {"a": Y, "b": Y}, {"a": W}).batch(4).map(lambda x, y, w: (x, y, {**w, "b": None}))
    for data in (weighed, weighed.unbatch(), (X, {"a": Y, "b": Y}, {"a": W})):
        entered, _ = user_data.enter(Data(data), weighs_outputs=True)
        np.testing.assert_array_equal(fields(all_of(entered.train)).labels.weights["b"], np.ones(N))


def test_a_component_whose_rows_only_reading_shows_has_as_many_as_the_others():
    positive = dataset(X, Y).batch(4, drop_remainder=True).map(lambda x, y: (x, tf.boolean_mask(y, y > -1)))
    assert positive.element_spec[1].shape[0] is None
    stream = user_data.split("x", positive, AS_KERAS)
    assert stream.batch_examples == 4
    np.testing.assert_array_equal(fields(all_of(stream)).labels, Y[: len(Y) // 4 * 4])


class Graphs(tf.keras.utils.PyDataset):
    """A batch is one graph of eight nodes, in two parts with a label each."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return np.ones([8, 1], np.float32), np.ones([2, 1], np.float32)


@pytest.mark.parametrize(
    ("data", "rules", "says"),
    [
        (
            (dataset(X, Y), Y),
            user_data.Rules(),
            "x data is a _TensorSliceDataset, which comes with all of an example; lea",
        ),
        ((each for each in [X]), user_data.Rules(), "a generator can be read once only"),
        ((None, Y), user_data.Rules(), "the x data has no features"),
        (dataset(X, Y), AS_KERAS, "the x dataset's elements are not batches: their arrays have 0, 2 examples; call da"),
        (
            dataset(np.ones([3, 8, 2]), np.ones([3, 2])),
            AS_KERAS,
            "the x dataset's elements are not batches: their arrays have 2, 8 examples; .* make as many in each",
        ),
        (Graphs(), AS_KERAS, r"Graphs\[0\] is a batch with arrays of 8, 2 examples; make as many of each"),
        (dataset(X, Y).batch(4).filter(lambda *_: False), AS_KERAS, "the x data is an empty dataset"),
        (
            dataset(X, Y).map(lambda x, y: (tf.numpy_function(np.abs, [x], tf.float32), y)).batch(4),
            AS_KERAS,
            r"the x dataset's examples are of unknown rank \(features\); use tf.ensure_shape in map",
        ),
        ((X, Y, [[1.0, -1.0]] * N), AS_KERAS, r"negative or not finite; .*\(found -1.0 at example 0"),
    ],
)
def test_what_cannot_be_one_is_one_line(data, rules, says):
    with pytest.raises(UsageError, match=says):
        user_data.split("x", data, rules)


class Third(tf.keras.utils.PyDataset):
    """One batch is of another shape than the first two and the last, which show the form of all."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        return np.ones([2, 4 if number == 2 else 3], np.float32), np.ones(2)


def test_a_batch_of_another_shape_is_named_as_it_is_read():
    split = user_data.split("train", Third())
    assert split.read(np.array([9, 3]))[0].shape == (2, 3)
    with pytest.raises(
        CrankshaftError, match=r"Third\[2\] has examples of shape \[4\], and at first there are \[3\]; ma"
    ):
        split.read(np.array([3, 4]))


class Growing(tf.keras.utils.PyDataset):
    """The last batch is larger than the first."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return np.ones([(2, 5)[number], 3], np.float32), np.ones((2, 5)[number])


def test_a_last_batch_that_is_larger_is_named_as_it_is_read():
    with pytest.raises(CrankshaftError, match=r"Growing\[1\] has 5 examples, and its first batch 2; make all but the"):
        all_of(user_data.split("train", Growing()))


class Batches(tf.keras.utils.PyDataset):
    """Batches of two, padded to the longest of each."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return np.ones([2, 3 + number, 1], np.float32), np.ones(2)


def rows_of_any_length():
    return tf.data.Dataset.range(1, 7).map(lambda n: (tf.ones([n, 1]), 1.0)).padded_batch(2)


def windows():
    return tf.keras.utils.timeseries_dataset_from_array(X, Y[:7].astype("float32"), 4, batch_size=2)


@pytest.mark.parametrize("make", [Batches, rows_of_any_length, windows])
def test_a_dataset_is_read_alike_for_training_evaluation_and_predictions(make):
    batches, of_run = make(), user_data.Rules(rank=3)
    trained = user_data.split("train", batches).element_spec
    assert type(trained[0]) is (Padded if make is windows else Unmeasured)
    assert user_data.split("given", batches, of_run).element_spec == trained
    assert user_data.features(batches, of_run).element_spec[0] == trained[0]
    if make is not windows:  # of which Keras's `fit` has the shape of the first
        assert user_data.split("x", batches, AS_KERAS).element_spec == trained


def test_weights_of_padded_batches_have_one_shape():
    """That of the first batches, also where examples may differ."""

    def padded(n):
        three = tf.ones([3 + 0 * n])
        return three[:, None], three, three

    split = user_data.split("x", tf.data.Dataset.range(4).map(padded).padded_batch(2), AS_KERAS)
    features, labels, weights = split.element_spec
    assert features.values.shape == (None, 1)
    assert labels.values.shape == (None,)
    assert weights.shape == (3,)


def batches_or_examples():
    """Elements of four rows, which are four examples or one."""
    rows = dataset(np.ones([12, 4], np.float32), np.ones([12, 4], np.float32))
    tiled = rows.flat_map(lambda *parts: dataset(*(tf.tile(part[None], [4, 1]) for part in parts)).batch(4, True))
    return tiled.map(lambda x, y: (x[:, 0], y[:, 0]))


def saved_batches():
    with tempfile.TemporaryDirectory() as folder:
        dataset(X, Y).batch(4).save(folder)
        return tf.data.Dataset.load(folder)


def arrays_of_a_generator():
    return tf.data.Dataset.from_generator(lambda: iter([np.ones([8, 3])]), output_signature=tf.TensorSpec([8, 3]))


class Graph(tf.experimental.BatchableExtensionType):
    nodes: tf.Tensor


# The data, and what the line says: what is wrong and the cure.
MISTAKES = [
    (
        lambda: Data(X, Y),
        "the train data is a ndarray; give (features, labels) ... ((features, labels), None) is train",
    ),
    (lambda: Data(range(3)), "the train data is a range; give ... or an iterable of batches in a torch.utils.data"),
    (lambda: Data(MapDataset(MapDataset())), "the train data is a MapDataset whose operations show no batch"),
    (lambda: Data(FlatMapMapDataset(BatchMapDataset())), "show no batch ... end it with batch(32) ... unbatch()"),
    (lambda: Data((X, Y), 3), "the eval data is a int; give (features, labels)"),
    (lambda: Data((X, Y, Y, 1)), "the train data is 4 values; give (features, labels)"),
    (lambda: Data((X, Y), (X,)), "the train data has labels, and the eval data has features; give both in"),
    (lambda: Data((X, Y), {"a/b": (X, Y)}), "the eval data has a set named 'a/b'; a name is text, without /"),
    (lambda: Data((X, Y), {"a": (X, Y), "b": (X,)}), "the train data has labels, and the eval data has features; give"),
    (lambda: Data((X, Y), {"a": dataset(X, Y).repeat()}), "the eval['a'] dataset never ends, and an evaluation reads"),
    (lambda: Data({"a": X}, {"b": X}), "the train data has features['a'], and the eval data has features['b']"),
    (lambda: Data((X, Y, -W)), "a weight of the train data is negative or not finite; give numbers of"),
    (lambda: Data((X, Y, 0 * W)), "all weights of the train data are 0"),
    (lambda: Data((X, Y, X)), "the weights of the train data, its third part, are of shape [2] an"),
    (lambda: Data((X, Y, W[1:])), "the train data has arrays of 10, 10, 9 examples"),
    (lambda: Data((X, Y, W.astype(str))), "the weights of the train data, its third part, are of type"),
    (lambda: Data((X.astype(object), Y)), "has an array of Python objects (features), a float among them"),
    (lambda: Data(({"a": X.astype("M8[s]")}, Y)), "has an array of datetime64[s] (features['a']), which"),
    (lambda: Data((X, Y), ({"a": X, "b": X[:3]}, Y)), "the eval data has arrays of 10, 3, 10"),
    (lambda: Data((X, Y), (X[:0], Y[:0])), "the eval data has no examples"),
    (lambda: Data((X, 3)), "the train data"),
    (lambda: Data((X, "label")), "the train data"),
    (lambda: Data((X + 1j, Y)), "the train data holds complex numbers (complex64)"),
    (lambda: Data(dataset(X, Y).take(0)), "the train data is an empty dataset"),
    (lambda: Data(dataset(X + 1j, Y)), "the train data holds complex numbers (complex64)"),
    (
        lambda: Data(tf.data.Dataset.from_tensor_slices(X), dataset(X, Y)),
        "the eval data has labels, and the train data has features; give",
    ),
    (lambda: Data(dataset(X, Y, Y, Y)), "the train dataset's elements are 4 values; give (features"),
    (lambda: Data(dataset(X, Y, X)), "the weights of the train data, its third part, are of shape"),
    (
        lambda: Data(dataset(X, Y).map(lambda x, y: (tf.py_function(lambda x: x, [x], tf.float32), y))),
        "the train dataset's examples are of unknown rank (features); use tf.ensure_shape in map",
    ),
    (
        lambda: Data(dataset(X[:, 0], Y).map(lambda x, y: (tf.RaggedTensor.from_row_lengths(x[None], [1]), y))),
        "the train dataset holds a RaggedTensorSpec; give dense tensors: in dataset.map, pad a ragged x to one shape",
    ),
    (
        lambda: Data(dataset(Graph(X), Y)),
        "the train dataset holds a Graph.Spec, and examples are tensors; in dataset.map, return its tensors in a dict",
    ),
    (lambda: Data(dataset(X, Y).window(2)), "the train dataset holds a DatasetSpec, and examples are tensors"),
    (
        lambda: Data(batches_or_examples()),
        "elements have a first axis of 4 in each component, 4 examples or one ... unbatch(); if ... with batch(1)",
    ),
    (lambda: Data(saved_batches()), "elements have a first axis of any length in each component, as many examples"),
    (lambda: Data(arrays_of_a_generator()), "elements have a first axis of 8 in each component, 8 examples or one"),
]


@pytest.mark.parametrize("row", range(len(MISTAKES)))
def test_data_that_cannot_be_used_is_described(row):
    make, says = MISTAKES[row]
    with pytest.raises(UsageError) as caught:
        user_data.enter(make())
    assert_says(caught.value.message, says)


@pytest.mark.parametrize("make", ["tensor", "scipy"])
def test_a_sparse_array_reads_dense_examples(make):
    dense = np.random.default_rng(0).normal(size=[9, 4]) * (np.arange(36).reshape(9, 4) % 3 == 0)
    dense[5] = 0
    if make == "tensor":
        dense = dense.reshape(9, 2, 2)
        matrix = tf.sparse.from_dense(dense)
    else:
        matrix = pytest.importorskip("scipy.sparse").csr_matrix(dense)
    sparse = wrap(matrix)
    assert (len(sparse), sparse.shape, sparse.ndim, sparse.nbytes) == (9, dense.shape, dense.ndim, dense.nbytes)
    for examples in (3, slice(1, 8, 2), slice(None), np.array([5, 0, 8, 5]), np.array([[1, 2], [5, 4]]), []):
        np.testing.assert_array_equal(sparse[examples], dense[examples])
    part = sparse.view(slice(4, 7)).astype("float32")
    np.testing.assert_array_equal(part[[1, 0]], dense[[5, 4]].astype("float32"))
    np.testing.assert_array_equal(np.asarray(part), dense[4:7].astype("float32"))


def test_parts_of_a_dataset_that_is_in_another_order_each_time_are_a_line(caplog):
    """As Keras, which trains on examples that it has evaluated; but nobody means that."""
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    again, once = examples.shuffle(N), examples.shuffle(N, reshuffle_each_iteration=False)
    mixed = (again.take(2), examples.shuffle(N).map(lambda x, y: (2 * x, y)).skip(2).batch(4))
    divided = (examples.take(2).shuffle(N), examples.skip(2).shuffle(N))
    other = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N)
    pairs = (mixed, (once.take(2), once.skip(2)), divided, (again, again.take(2)), (again.take(2), other.take(2)))
    with caplog.at_level("WARNING", logger="crankshaft"):
        for pair in pairs:
            user_data.enter(Data(*(user_data.split("either", each) for each in pair)))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in another order at each reading" in line
    assert "give its shuffle reshuffle_each_iteration=False" in line


def test_a_cache_that_a_killed_process_left_half_written_is_one_line(tmp_path):
    (tmp_path / "x.cache_0.lockfile").write_text("Created at: 1")
    with pytest.raises(UsageError, match=r"x.cache_0.lockfile is there; if no other process reads this"):
        user_data.split("x", dataset(X, Y).cache(f"{tmp_path}/x.cache"))
