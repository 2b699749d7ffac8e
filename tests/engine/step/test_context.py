"""What a step samples by, and where it stands."""

import dataclasses

import pytest
import tensorflow as tf

from crankshaft.engine.step.context import StartValues, StepContext, step_context
from crankshaft.engine.step.options import StepOptions


def context(**changes):
    at = {"step": tf.constant(3, tf.int64), "replica": tf.constant(1), "shard": tf.constant(1), "run_seed": 5}
    return StepContext(**{**at, **changes})


def sample(context, *name, **how):
    return tuple(context.seed(*name, **how).numpy().tolist())


def count(number):
    return tf.Variable(number, dtype=tf.int64)


def test_a_seed_is_of_the_run_the_step_the_replica_the_micro_batch_and_the_call():
    here, batch = context(), {"batch_number": tf.constant(3, tf.int64)}
    seeds = [
        sample(here),
        sample(here),
        sample(here, "noise"),
        sample(here, common=True),
        sample(here, common=True),
        sample(here, "noise", common=True),
        tuple(here.keras_seed().numpy().tolist()),
        tuple(here.keras_seed().numpy().tolist()),
        sample(context(run_seed=6)),
        sample(context(step=tf.constant(4, tf.int64))),
        sample(context(replica=tf.constant(0))),
        sample(context(micro_batch=1)),
        sample(context(**batch)),
        sample(context(batch_number=tf.constant(4, tf.int64))),
    ]
    assert len(set(seeds)) == len(seeds)
    assert sample(context()) == seeds[0]
    assert sample(context(shard=tf.constant(0))) == seeds[0]
    other = context(replica=tf.constant(0))
    assert [sample(other, common=True), sample(other, "noise", common=True)] == [seeds[3], seeds[5]]
    assert sample(here, "noise") == seeds[2] != sample(other, "noise") != seeds[5]
    assert sample(context(updates_before=count(2), step=tf.constant(1, tf.int64))) == seeds[0]
    assert sample(context(updates_before=count(2), step=tf.constant(1, tf.int64), **batch)) == seeds[12]


def test_micro_batches_sample_from_the_same_number_on_and_what_follows_differs_from_all():
    step = context()
    first = sample(step)
    found = []
    enter = step.micro_batch_contexts(3)
    for outer, calls in ((0, 1), (2, 2), (1, 1)):
        with enter(outer):
            assert step_context().micro_batch == outer
            found.append([sample(step_context()) for _ in range(calls)])
            inner = step_context().micro_batch_contexts(2)
            for number in range(2):
                with inner(number):
                    assert step_context().micro_batch == 2 * outer + number
    assert step_context().step is None
    assert found[0][0] == sample(context(sampled=step.sampled.__class__(call=1)))
    after = sample(step)
    assert len({first, after, *(seed for each in found for seed in each)}) == 6
    assert step.sampled["call"] == 4


class Generator:
    def __init__(self, within_shard=False):
        self.state, self.within_shard = tf.keras.Variable([0, 0], dtype="int64"), within_shard


class Replacing(StartValues):
    """Values that stand for variables, which others write."""

    replaces_variables = True

    def __init__(self, variable):
        super().__init__()
        self.variable, self.reads = variable, []

    def read(self):
        return [(self.variable, tf.constant(7.0))]

    def up_to_date(self, is_once):
        self.reads.append(is_once)
        return self


@pytest.mark.parametrize("assigns", [True, False])
def test_layers_sample_by_the_replica_or_its_shard(assigns):
    whole, shard, again = Generator(), Generator(within_shard=True), Generator()
    step = context(generators=((whole, 0), (shard, 1), (again, 0)), replica=tf.constant(1), shard=tf.constant(2))
    step.seed_layers(assigns)
    (_, own), (_, of_shard), (_, shared) = [(variable, tuple(state.numpy())) for variable, state in step.layer_states]
    assert [variable for variable, _ in step.layer_states] == [whole.state, shard.state, again.state]
    assert own == shared != of_shard
    assert tuple(whole.state.numpy()) == (own if assigns else (0, 0))
    same = context(generators=((whole, 0), (shard, 1)), replica=tf.constant(2), shard=tf.constant(2))
    same.seed_layers()
    assert tuple(shard.state.numpy()) == of_shard
    assert tuple(whole.state.numpy()) != own
    before = tuple(whole.state.numpy())
    same.seed_layers()
    assert tuple(whole.state.numpy()) != before
    enter = same.micro_batch_contexts(2)
    states = set()
    for number in range(2):
        with enter(number):
            states.add(tuple(whole.state.numpy()))
    assert len(states | {before}) == 3


def test_layers_compute_with_values_that_stand_for_variables():
    variable, generator = tf.keras.Variable(1.0), Generator()
    replacing = Replacing(variable)
    plain, replaced = (context(start_values=each, generators=((generator, 0),)) for each in (StartValues(), replacing))
    for step in (plain, replaced):
        step.seed_layers(assigns=False)
    assert plain.values == []
    assert [each for each, _ in replaced.values] == [variable, generator.state]
    assert plain.up_to_date().start_values is plain.start_values
    assert replaced.up_to_date().start_values is replaced.up_to_date(is_once=False).start_values is replacing
    assert replacing.reads == [True, False]
    with replaced.micro_batch_contexts(2)(1):
        assert step_context().values
        assert generator.state.numpy().tolist() == [0, 0]


def test_a_step_trains_unless_it_has_a_batch_of_an_evaluation():
    assert context().is_training
    assert not context(batch_number=tf.constant(0, tf.int64)).is_training
    assert not StepContext().is_training
    assert not StepContext(batch_number=tf.constant(0, tf.int64)).is_training


def test_a_copy_samples_on_as_the_original_does():
    step = context()
    sample(step)
    copy = step.copy()
    assert sample(copy) == sample(step)
    assert float(dataclasses.replace(step, start_values=StartValues(tf.constant(8.0))).scaled(tf.constant(0.5))) == 4.0
    assert float(step.scaled(tf.constant(0.5))) == 0.5


@pytest.mark.parametrize("given", [{"step": None}, {"replica": None}])
def test_there_is_no_seed_outside_of_a_step(given):
    with pytest.raises(ValueError, match=r"seed\(\) was called outside of a step; call it in train_step"):
        context(**given).seed()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "float8"}, "precision=float8 is unknown; use one of float32, bfloat16, float16"),
        ({"on_nonfinite": "go"}, "on_nonfinite=go is unknown; use one of raise, skip"),
        ({"clip_value": 0.5, "clip_norm": 1.0}, "clip_norm=1.0 and clip_value=0.5 clip the same gradients; use one"),
        ({"clip_value": 0.5, "clip_variable_norm": 2.0}, "clip_variable_norm=2.0 and clip_value=0.5 clip the same"),
        ({"accumulate_steps": 0}, "accumulate_steps=0 is not a count; use 1 or more"),
        ({"parallel_micro_batches": 0}, "parallel_micro_batches=0 is not a count"),
        ({"ema_decay": 1.0}, "ema_decay=1.0 is not a decay"),
        ({"ema_decay": -0.1}, "ema_decay=-0.1 is not a decay"),
        ({"ema_warmup": False}, "ema_warmup=False needs ema_decay"),
    ],
)
def test_options_out_of_range_are_refused(options, line):
    with pytest.raises(ValueError, match=line):
        StepOptions(**options)


def test_options_that_a_step_has_to_apply_are_those_that_differ_from_their_defaults():
    excluded = StepOptions(seed=3, total_steps=9, debug=True, weight_decay_exclude="bias|gamma|beta|(gain|scale)$")
    assert excluded.changed == {}
    assert StepOptions(clip_norm=1.0, weight_decay_exclude="bias").changed == {
        "clip_norm": 1.0,
        "weight_decay_exclude": "bias",
    }
    assert StepOptions(accumulate_steps=3, parallel_micro_batches=4).micro_batches == 12
    assert StepOptions(ema_decay=0.0, ema_warmup=True).changed == {}
    assert StepOptions(ema_decay=0.5, ema_warmup=False).changed == {"ema_decay": 0.5, "ema_warmup": False}
    skips = [StepOptions(**each).may_skip for each in ({}, {"on_nonfinite": "skip"}, {"precision": "float16"})]
    assert skips == [False, True, True]
    assert not StepOptions(precision="bfloat16").may_skip
