"""What a step needs, by hand-computed values, and beside what the engine itself stores and sends."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import tensorflow as tf

from crankshaft.engine.internals import graphs
from crankshaft.engine.strategies.syncs import Syncs
from crankshaft.launch import program
from crankshaft.launch.composition import building
from crankshaft.parts.plan.peak_memory import peak
from crankshaft.parts.plan.quantify import quantify
from crankshaft.parts.plan.traced_ops import tensor_bytes
from crankshaft.runner.command_line import parsing
from crankshaft.runner.data import inputs, loading
from crankshaft.runner.failures import UsageError
from crankshaft.runner.restored import state as states

WIDER = ("--model=mlp", "--input=digits", "--train_steps=8", "--global_batch_size=32")
MLP = (*WIDER, "--model_arg=hidden_units=16")
TOKENS = ("--model=transformer_lm", "--input=text", "--input_arg=context=16", "--model_arg=layers=2")
LM = (*TOKENS, "--model_arg=width=16", "--model_arg=heads=2", "--train_steps=8", "--global_batch_size=8")
MIRRORED = ("--strategy=mirrored", "--num_virtual_devices=2")
VALUES = 784 * 16 + 16 + 16 * 10 + 10
FEW = 256  # bytes of a step's scalars: counts, the number of the step, a learning rate


def configured(*flags, workers=0):
    passed = parsing.from_argv(["crankshaft train", *flags])
    cluster = {"worker": [f"127.0.0.1:{1000 + index}" for index in range(workers)]}
    task = {"type": "worker", "index": 0}
    environment = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} if workers else {}
    return program.configure(passed, None, False, environment, owns_process=False)


def quantified(*flags, hosts=1):
    more = ("--strategy=multi_worker",) if hosts > 1 else ()
    return quantify(configured(*flags, *more, workers=hosts if more else 0), hosts)


def test_an_mlp_by_hand():
    work = quantified(*MLP)
    assert 4 * VALUES <= work.memory.weights < 4 * VALUES + FEW
    assert 8 * VALUES <= work.memory.optimizer < 8 * VALUES + FEW  # Adam's m and v
    assert 4 * 784 * 16 <= work.memory.gradients <= 4 * VALUES
    assert work.memory.data == (5844 + 32) * (784 + 1)  # bytes of examples, and of a batch of them
    assert 12 * VALUES <= work.checkpoint_bytes < 12 * VALUES + FEW
    # Forward, the same for the weights' gradients, and the inputs' gradient of all layers but the first.
    assert work.flops == {"float32": 2 * (2 * 32 * (784 * 16 + 16 * 10)) + 2 * 32 * 16 * 10}
    assert (work.replicas, work.examples, work.steps, work.input_bytes, work.messages) == (1, 32, 8, 0.0, ())


COMPILED = """
import keras
import numpy as np


def model():
    made = keras.Sequential([keras.Input([784]), keras.layers.Dense(16, "relu"), keras.layers.Dense(10, "sigmoid")])
    made.compile("adam", "binary_crossentropy", metrics=["AUC"])
    return made


def load(data_dir, seed):
    return (np.zeros([64, 784], "float32"), np.zeros([64, 10], "float32")), None
"""


def test_a_compiled_model_is_planned_as_a_trainer_is(tmp_path):
    (path := tmp_path / "compiled.py").write_text(COMPILED)
    work = quantified(f"--model={path}", f"--input={path}", "--train_steps=8")
    assert 12 * VALUES <= work.checkpoint_bytes < 12 * VALUES + FEW
    assert 8 * VALUES <= work.memory.optimizer < 8 * VALUES + FEW


def test_several_workers_by_hand():
    (sent,) = quantified(*MLP, hosts=2).messages  # gathered, since it is small; with the number of examples
    assert (sent.kind, sent.bytes, sent.members, sent.link) == ("all_gather", 2 * 4 * (VALUES + 1), 2, "hosts")
    many = quantified(*WIDER, "--model_arg=hidden_units=4096", hosts=32)
    assert {sent.kind for sent in many.messages} == {"all_reduce"}
    buckets = 784 * 4096, 4096 + 4096 * 10 + 10 + 1  # the first layer's kernel fills one
    assert {sent.bytes: sent.wire_bytes for sent in many.messages} == {4 * n: 2 * 31 / 32 * 4 * n for n in buckets}


def sent_by_the_engine(config):
    """Returns the bytes that the first replica of a real strategy puts into each collective of its traced step."""
    strategy = building.make_strategy(config)
    run_inputs = inputs.build(config, loading.load(config), strategy)
    state = states.build_state(config, strategy, run_inputs, 8)
    strategy.bind(state, run_inputs.feeds["train"])
    traced = [strategy.training.one_step(0).graph]
    if state.trainer.reduction.sync_every_steps:
        traced.append(Syncs(strategy.distribution, state.trainer.reduction).sync.get_concrete_function().graph)
    ops = [op for graph in traced for op in graphs.operations(graph)]
    ours = [op for op in ops if op.type.startswith("Collective") and op.device.endswith("CPU:0")]
    return Counter(tensor_bytes(op.inputs[0]) for op in ours)


@pytest.mark.parametrize(
    "flags",
    [
        (*WIDER, "--model_arg=hidden_units=256", *MIRRORED, "--mesh=data:2", "--shard_optimizer=true"),
        (*LM, *MIRRORED, "--mesh=model:2"),
        (*MLP, *MIRRORED, "--sync_every_steps=4"),
        pytest.param((*LM, *MIRRORED, "--mesh=model:2", "--recompute=true"), marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_sends_what_the_engine_sends(flags):
    config, sent = configured(*flags), Counter()
    for message in quantify(config, 1).messages:
        own = message.bytes / message.members if message.kind == "all_gather" else message.bytes
        sent[int(own)] += round(message.count * (config.sync_every_steps if message.count < 1 else 1))
    assert sent == sent_by_the_engine(config)


def test_a_model_of_two_gigabytes_takes_no_memory_to_plan():
    def memory(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

    before, most = memory("VmRSS"), memory("VmHWM")
    work = quantified(*WIDER, "--model_arg=hidden_units=22000,22000")
    assert work.memory.weights > 1.9e9
    assert memory("VmHWM") <= max(most, before + (256 << 20))


def test_tensors_are_held_from_their_making_to_their_last_use():
    @tf.function(autograph=False)
    def step(x):
        first = tf.sin(x)
        second = tf.cos(first)
        third = tf.nn.relu(second)  # in place
        return tf.reduce_sum(third * first)

    graph = step.get_concrete_function(tf.TensorSpec([250, 1000])).graph
    assert peak(graph).total == pytest.approx(2e6, rel=1e-5)


def test_a_variable_updated_by_rows_is_copied_to_be_read():
    with tf.Graph().as_default():
        table, dense = tf.Variable(tf.zeros([250, 1000])), tf.Variable(tf.zeros([250, 1000]))

        @tf.function(autograph=False)
        def step(ids):
            rows = tf.gather(table, tf.cast(table[0, 0], tf.int32)) * tf.reduce_sum(table.read_value() * dense)
            table.scatter_sub(tf.IndexedSlices(rows[tf.newaxis], ids))
            return tf.reduce_sum(rows)

        graph = step.get_concrete_function(tf.TensorSpec([1], tf.int32)).graph
    reads = sum(op.type == "ReadVariableOp" and op.inputs[0] is graph.inputs[1] for op in graph.get_operations())
    assert peak(graph).total == pytest.approx(reads * 1e6, rel=0.05)  # of which the product overwrites one


@pytest.mark.parametrize("waits", [False, True])
def test_an_update_copies_a_variable_that_another_op_may_still_read(waits):
    """On a CPU's threads; a device's stream runs one op after another."""
    with tf.Graph().as_default():
        kernel = tf.Variable(tf.zeros([250, 1000]))

        @tf.function(autograph=False)
        def step(x):
            value = kernel.read_value()
            outputs = tf.linalg.matmul(x, value, transpose_b=True)
            change = tf.linalg.matmul(outputs, x, transpose_a=True)
            inputs_gradient = tf.linalg.matmul(outputs, value)
            with tf.control_dependencies([inputs_gradient] if waits else []):
                kernel.assign_sub(change)
            return tf.reduce_sum(inputs_gradient)

        graph = step.get_concrete_function(tf.TensorSpec([1, 1000])).graph
    assert peak(graph, runs_in_parallel=True).total == pytest.approx(1e6 if waits else 2e6, rel=0.02)
    assert peak(graph, runs_in_parallel=False).total == pytest.approx(1e6, rel=0.02)


def test_an_average_starts_after_the_update_that_it_follows():
    with tf.Graph().as_default():
        first, second = tf.Variable(tf.zeros([250, 1000])), tf.Variable(tf.zeros([250, 1000]))

        @tf.function(autograph=False)
        def step():
            first.assign_sub(tf.sin(first.read_value()))
            second.assign_sub(tf.cos(first.read_value()))  # once the sine has gone
            return tf.constant(0.0)

        graph = step.get_concrete_function().graph
    assert peak(graph).total == pytest.approx(1e6, rel=0.02)


def kept_by_a_loop(turns):
    """A gradient through turns of two tensors of a megabyte, of which the second begins the next turn."""

    @tf.function(autograph=False)
    def step(x, w, turns):
        def turn(i, x):
            y = tf.sin(x)
            return i + 1, tf.tanh(y * w)

        with tf.GradientTape() as tape:
            tape.watch(w)
            _, last = tf.while_loop(lambda i, _: i < turns, turn, (0, x))
            loss = tf.reduce_sum(last)
        return tape.gradient(loss, w)

    specs = tf.TensorSpec([250, 1000]), tf.TensorSpec([250, 1000])
    return peak(step.get_concrete_function(*specs, turns).graph)


def test_what_turns_keep_for_their_gradients_is_held_once_each():
    found = {turns: kept_by_a_loop(turns) for turns in (50, 100)}
    assert found[100].total - found[50].total == pytest.approx(50 * 2e6, rel=0.01)
    assert 200e6 < found[100].total < 210e6
    assert not found[100].uncertain
    (line,) = kept_by_a_loop(tf.TensorSpec([], tf.int32)).uncertain
    assert "the memory is a lower bound, without what turns of while keep: their number is not in the graph" in line


@pytest.mark.thorough
def test_recompute_holds_less():
    kept, again = (quantified(*LM, f"--recompute={recompute}").memory for recompute in ("false", "true"))
    assert again.activations < 0.8 * kept.activations


@pytest.mark.thorough
def test_a_plan_for_cpus_names_what_a_step_computes_as_uncertain():
    assert not quantified(*WIDER).uncertain  # most is data
    (line,) = quantified(*LM).uncertain
    assert line.startswith("activations and gradients, of which processes on CPUs took ")
    assert not quantify(configured(*LM), 1, kind="gpu").uncertain


@pytest.mark.parametrize(
    ("flags", "hosts", "line"),
    [
        (("--strategy=multi_worker",), 5, "does not divide over 5 replicas"),
        ((*MIRRORED, "--mesh=model:3"), 1, "does not lay out 2 replicas"),
    ],
)
def test_what_a_strategy_cannot_use_is_one_line(flags, hosts, line):
    config = configured(*MLP, *flags, workers=hosts if "--strategy=multi_worker" in flags else 0)
    with pytest.raises(UsageError, match=line) as raised:
        quantify(config, hosts)
    assert "\n" not in str(raised.value)
