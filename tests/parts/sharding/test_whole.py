"""A run whose model is sharded over a mesh is saved, averaged, compared and put back as one that is not."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import loop
from crankshaft.engine.errors import NonfiniteError, OutOfSyncError
from crankshaft.engine.hooks import numerics
from crankshaft.engine.hooks.sync_check import SyncCheck
from crankshaft.engine.mesh import sharded
from crankshaft.models.transformer_lm import Model
from crankshaft.parts.keras_models.keras_callbacks import KerasCallbacks
from tests.arrays import assert_close, assert_same
from tests.bench import assert_same_bits

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 37, (24, 9)).astype(np.int32)
RUN = {"num_classes": 37, "learning_rate": 0.01, "optimizer": "adam", "ema_decay": 0.9}


@pytest.fixture
def made(bench, compiled):
    """made(data, model): a small language model of 37 tokens, which do not divide, on such a mesh."""

    def make(data, model, **options):
        model_of = Model(layers=1, width=16, heads=2)
        source = TOKENS[:, :-1], TOKENS[:, 1:]
        how = {"model": model, "eval_source": source, **RUN, **options}
        return compiled((data, model, str(options)), lambda: bench(model_of, source, 8, data * model, **how))

    return make


def status(bench):
    return loop.Loop(bench.strategy, bench.state, [], 1000).status


def wholes(bench):
    return [sharded.whole(variable) for variable in bench.state.variables() if variable.dtype == tf.float32]


@pytest.mark.thorough
def test_a_run_goes_on_to_the_bit_on_its_mesh_and_within_rounding_on_one_device(made, tmp_path):
    first = made(2, 2)
    assert_same_bits(first, tmp_path, 3, 8)
    one = made(1, 1).restore(tmp_path)
    one.train(8)
    assert_close(wholes(one), wholes(first), rtol=1e-5, atol=1e-5)  # Adam divides by small numbers


@pytest.mark.thorough
def test_padding_begins_again_as_it_began(made, tmp_path):
    """Of 37 tokens on two replicas one row is padding, whose slot Adagrad divides by."""
    assert_same_bits(made(1, 2, optimizer="adagrad"), tmp_path, 3, 6)


def test_averages_are_of_each_part_and_what_was_swapped_comes_back_to_the_bit(made):
    bench = made(2, 2)
    average, variables = bench.trainer.optimizer.weight_average, bench.trainer.model.trainable_variables
    for variable, shadow in zip(variables, average.shadows, strict=True):
        np.testing.assert_array_equal(sharded.whole(shadow), sharded.whole(variable))
    bench.train(4)
    before, shadows = bench.arrays(), [sharded.whole(shadow) for shadow in average.shadows]
    with average.averages_in_place():
        for variable, shadow in zip(variables, shadows, strict=True):
            np.testing.assert_array_equal(sharded.whole(variable), shadow)
    assert_same(bench.arrays(), before)
    with bench.state.restoring():
        bench.train(6)
    assert_same(bench.arrays(), before)


def test_copies_are_compared_over_all_replicas_and_parts_among_those_that_hold_them(made):
    bench = made(2, 2)
    bench.train(3)
    check = SyncCheck(1)
    check.begin(status(bench))
    check.act(status(bench))
    variables = {variable.path: variable for variable in bench.trainer.model.trainable_variables}
    shard = next(path for path, variable in variables.items() if sharded.variable_sharding(variable))
    copy = next(path for path, variable in variables.items() if not sharded.variable_sharding(variable))
    for path, replicas in [(shard, 2), (copy, 4)]:
        (_, other) = list(sharded.local_shards(variables[path]))[3]
        before = other.numpy()
        other.assign(np.nextafter(before, 1, dtype=np.float32))
        with pytest.raises(OutOfSyncError, match=f"replica 3 of {replicas} replicas holds other values of {path}"):
            check.act(status(bench))
        other.assign(before)
    check.act(status(bench))


@pytest.mark.thorough
def test_a_position_in_a_stream_is_no_replicas(bench):
    source = tf.data.Dataset.from_tensor_slices((TOKENS[:, :-1], TOKENS[:, 1:]))
    run = bench(Model(layers=1, width=16, heads=2), source, 8, 2, model=2, num_classes=37)
    run.train(2)
    run.state.input.capture(2)
    check = SyncCheck(1)
    check.begin(status(run))
    check.act(status(run))


def test_a_weight_that_is_not_finite_is_found_in_any_part(made):
    bench = made(1, 2)
    numerics.check_weights(bench.trainer, "here")
    weight = next(
        variable for variable in bench.trainer.model.trainable_variables if sharded.variable_sharding(variable)
    )
    (_, shard) = list(sharded.local_shards(weight))[1]
    shard.assign(tf.fill(shard.shape, np.nan))
    with pytest.raises(NonfiniteError, match=f"here: variable {weight.path} is not finite"):
        numerics.check_weights(bench.trainer, "here")


def test_a_keras_callback_is_not_given_parts_for_the_weights(made, tmp_path):
    saving = tf.keras.callbacks.LambdaCallback()
    saving.on_train_begin = lambda logs: saving.model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="a Keras callback calls save_weights of the model, and each replica"):
        KerasCallbacks([saving]).begin(status(made(1, 2)))
