"""What a step leaves of itself for TensorBoard: it changes nothing, and shows what training does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.tensorboard import TensorBoard, event_values
from tests.arrays import assert_same
from tests.parts.tensorboard.boards import BATCH, EXAMPLES, Every, data, probe_of, tensor

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_histograms_are_those_of_the_step_over_all_replicas(made, tmp_path, replicas):
    bench = made(Mlp(hidden_units=(8,)), replicas)
    found = gradients_of_step(bench, 0)
    model = bench.trainer.model
    one = made(Mlp(hidden_units=(8,)))
    feed = one.strategy.training.feed
    features, labels = feed.batch(*feed.call_input(0, 1).operands, tf.constant(0))
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, one.trainer.model(features))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, one.trainer.model.trainable_variables)
    assert list(found) == [v.path for v in model.trainable_variables]
    for histogram, gradient in zip(found.values(), gradients, strict=True):
        assert int(tf.reduce_sum(histogram.counts)) == gradient.shape.num_elements()
        # Summed over replicas in another order: float32 rounding.
        assert float(histogram.low) == pytest.approx(float(tf.reduce_min(gradient)), rel=1e-4, abs=1e-7)
        assert float(histogram.high) == pytest.approx(float(tf.reduce_max(gradient)), rel=1e-4, abs=1e-7)


def gradients_of_step(bench, step):
    """The histograms that a step has left, by path."""
    probe = probe_of(bench)
    while bench.state.step <= step:
        bench.run(1)
    return probe.gradients()


def ranges(histograms):
    return np.array([(float(h.low), float(h.high)) for h in histograms.values()])


def test_a_replica_without_examples_counts_in_no_gradient(bench):
    """17 images by 16, of one of two workers: the second step's one example is on one of four replicas.

    Kernels do not bear no examples.
    """
    source = tuple(array[:17] for array in data())
    options = {"num_classes": 3, "shuffle": False}
    one = bench(Cnn(), source, 16, **options)
    many = bench(Cnn(), tf.data.Dataset.from_tensor_slices(source), 32, 4, workers=2, **options)
    found = [ranges(gradients_of_step(each, 1)) for each in (one, many)]
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)  # one example's: rounding of kernels alone


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_images_and_histograms_of_a_dataset_read_nothing_of_it(bench, tmp_path, replicas):
    """Each time that it is read its images are others, as those of a random generator that the dataset holds."""
    begun = []

    def examples():
        begun.append(1)
        for image, label in zip(*data(), strict=True):
            yield image + len(begun), label

    weights = []
    for histograms in (None, 0, 2):
        signature = tf.TensorSpec((12, 12, 1)), tf.TensorSpec((), tf.int32)
        whole = tf.data.Dataset.from_generator(examples, output_signature=signature)
        source = whole.apply(tf.data.experimental.assert_cardinality(EXAMPLES))
        made = bench(Mlp((8,)), source, BATCH, replicas, num_classes=3)
        begun.clear()
        hooks = [Every(1)]
        if histograms is not None:
            folder = tmp_path / str(histograms)
            hooks.append(TensorBoard(folder, 1, histogram_every_steps=histograms, probe=probe_of(made)))
        made.loop(hooks, 12)
        assert len(begun) <= 5  # three epochs and two fetched ahead: once
        weights.append(made.arrays())
        if histograms is not None:
            assert len(tensor(folder / "train", "inputs", 0)) > 2  # after its width and height
    for others in weights[1:]:
        assert_same(weights[0], others)
    assert tensor(folder / "train", "gradients/" + made.trainer.trainable_variables[0].path, 2).shape == (30, 3)


def test_histograms_are_of_whole_batches_not_of_micro_batches(bench):
    """Batch normalisation makes them tell: its mean is that of a micro-batch."""
    learning_rate = 0.5
    options = {"num_classes": 3, "accumulate_steps": 4, "optimizer": "sgd", "learning_rate": learning_rate}
    made = bench(Cnn(batch_norm=True), data(), 16, **options)
    variables = made.trainer.model.trainable_variables
    before = [v.numpy() for v in variables]
    found = gradients_of_step(made, 0)
    gradients = [(then - v.numpy()) / learning_rate for then, v in zip(before, variables, strict=True)]
    wanted = [(g.min(), g.max()) for g in gradients]
    np.testing.assert_allclose(ranges(found), wanted, rtol=1e-3, atol=1e-6)  # differences of float32 weights


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_looking_at_a_run_changes_no_bit_of_it(made, tmp_path, replicas):
    """Dropout samples, and batch normalisation moves."""

    def trainer():
        return Cnn(batch_norm=True)

    plain, watched = made(trainer(), replicas), made(trainer(), replicas)
    plain.loop([Every(2)], 7)
    watched.loop([TensorBoard(tmp_path, 3, histogram_every_steps=2, probe=probe_of(watched))], 7)
    assert_same(plain.arrays(), watched.arrays())


def test_weight_histograms_count_every_weight(made, tmp_path):
    bench = made(Mlp(hidden_units=(8,)))
    bench.loop([TensorBoard(tmp_path, 0, histogram_every_steps=3, probe=probe_of(bench))], 5)
    for variable in bench.trainer.model.trainable_variables:
        for kind in ("weights", "gradients"):
            table = tensor(tmp_path / "train", f"{kind}/{variable.path}", 3)
            assert table.shape == (30, 3)
            assert table[:, 2].sum() == np.prod(variable.shape)
            np.testing.assert_allclose(table[1:, 0], table[:-1, 1])


@pytest.mark.parametrize("values", [[], [2.0, 2.0], [np.nan, 1.0, 3.0, np.inf], [-3e38, 0.0, 3e38]])
def test_histogram_of_odd_values_counts_the_finite_ones(values):
    (value,) = event_values.histograms({"a": event_values.histogram(tf.constant(values, tf.float32))})
    table = tf.make_ndarray(value.tensor)
    assert np.isfinite(table).all()
    assert table[:, 2].sum() == np.isfinite(values).sum()


@pytest.mark.parametrize("jit", [False, True])
def test_histogram_counts_as_numpys(jit):
    values = np.random.default_rng(0).normal(size=[50, 7]).astype("float32")
    found = tf.function(event_values.histogram, jit_compile=jit)(tf.constant(values))
    counts, edges = np.histogram(values.astype("float64"), 30)
    assert (float(found.low), float(found.high)) == (edges[0], edges[-1])
    # A value within float32's rounding of an edge may be counted on the other side.
    np.testing.assert_allclose(np.cumsum(found.counts), np.cumsum(counts), atol=1)
    assert int(np.sum(found.counts)) == values.size
