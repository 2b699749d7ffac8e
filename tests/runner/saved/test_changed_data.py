"""A run that is called again with other data: refused, warned of, or evaluated again, and never taken for the same.

A run that is resumed with another batch size where an epoch ends: what counts epochs goes on.
"""

from __future__ import annotations

import collections
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer, mean
from crankshaft.engine.checkpoints.manifest import with_digest
from crankshaft.engine.hooks import every_epoch, every_steps
from tests import runs
from tests.input.test_mnist_files import EVAL_IMAGES, EVAL_LABELS, idx_bytes, write_data_set
from tests.input.test_tfrecord import example
from tests.launch.line import Line
from tests.runs import manifests, result, tensors

MNIST = ("--model=mlp", "--model_arg=hidden_units=4", "--input=mnist", "--jit=off", "--progress=plain")
QUIET = ("--jit=off", "--progress=plain", "--global_batch_size=8")


def images(folder, train_count=200, eval_count=100):
    folder.mkdir()
    write_data_set(folder, compressed=False, train_count=train_count, eval_count=eval_count)
    return folder


@pytest.fixture
def data(tmp_path):
    """A folder of 200 images to train on and 100 to evaluate on."""
    return images(tmp_path / "data")


def warnings(outcome) -> list[str]:
    return [line for line in outcome.err.splitlines() if " data is not that of " in line]


def shown(outcome) -> str:
    """The evaluation that the program's last line of one tells."""
    return re.findall(r"^evaluation at step \d+: (.*)$", outcome.out, re.MULTILINE)[-1]


@pytest.mark.thorough
def test_more_examples_to_train_on_are_refused_until_they_are_allowed(inside, data, tmp_path):
    run = (*MNIST, f"--run_dir={tmp_path}/run")
    inside(*run, f"--data_dir={data}", "--train_steps=4").ok()
    before = (tmp_path / "run" / "config.json").read_text()
    more = (*run, f"--data_dir={images(tmp_path / 'more', train_count=500)}", "--train_steps=8")
    outcome = inside(*more)
    assert f"run_dir={tmp_path}/run is a run of other training data (examples: 200 -> 500); use" in outcome.mistake
    assert outcome.error.endswith("another run_dir, the same data, or allow_changed_config")
    assert runs.newest(tmp_path / "run") == 4
    assert (tmp_path / "run" / "config.json").read_text() == before
    outcome = inside(*more, "--allow_changed_config").ok()
    assert "resumed at step 4 of 8" in outcome.out
    assert "the training data is not that of ckpt-4 (examples: 200 -> 500)" in warnings(outcome)[0]
    # From now on, this is the run's data.
    assert "examples: 500 -> 200" in inside(*run, f"--data_dir={data}", "--train_steps=12").error
    assert not warnings(inside(*more).ok())


def relabelled(folder, flips: bool) -> tuple[str, ...]:
    """Writes 400 records, of which the middle ones may have other labels, into a file of the same size each time."""
    folder.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(f"{folder}/a.tfrecord") as writer:
        for number in range(400):
            label = (number + (flips and 150 <= number < 250)) % 2
            writer.write(example(x=[float(number)] * 4, label=label))
    args = ("--model=logistic", "--input=tfrecord", f"--data_dir={folder}", "--input_arg=num_classes=2")
    return (*args, *QUIET)


@pytest.mark.thorough
def test_records_of_other_labels_are_warned_of_and_a_file_written_again_is_not(inside, tmp_path):
    run = (*relabelled(tmp_path / "data", False), f"--run_dir={tmp_path}/run")
    inside(*run, "--train_steps=4").ok()
    path = tmp_path / "data" / "a.tfrecord"
    size = path.stat().st_size
    os.utime(path, (1, 1))
    assert not warnings(inside(*run, "--train_steps=4", "--mode=train").ok())
    relabelled(tmp_path / "data", True)
    assert path.stat().st_size == size
    (warned,) = warnings(inside(*run, "--train_steps=8").ok())
    assert "the training data is not that of ckpt-4 (as many examples, of other contents)" in warned


@pytest.mark.thorough
def test_a_complete_runs_evaluation_is_made_anew_of_other_data(inside, data, tmp_path):
    run = (*MNIST, f"--run_dir={tmp_path}/run", "--train_steps=4")
    done = inside(*run, f"--data_dir={data}").ok()
    other = images(tmp_path / "other")
    for name, array in {EVAL_IMAGES: np.ones((70, 28, 28), np.uint8), EVAL_LABELS: np.zeros(70, np.uint8)}.items():
        (other / name).write_bytes(idx_bytes(array))
    again = inside(*run, f"--data_dir={other}").ok()
    (warned,) = warnings(again)
    assert "the evaluation data is not that of ckpt-4 (examples: 100 -> 70): it is evaluated again" in warned
    assert shown(again) != shown(done)
    assert shown(again) == shown(inside("--mode=eval", f"--run_dir={tmp_path}/run", f"--data_dir={other}").ok())
    # The checkpoint is still of the data that it was evaluated on.
    assert shown(inside(*run, f"--data_dir={data}").ok()) == shown(done)
    few = inside(*run, f"--data_dir={data}", "--eval_batches=1", "--eval_batch_size=20", "--allow_changed_config").ok()
    assert "(eval_batches: None -> 1): it is evaluated again" in warnings(few)[0]


def test_a_kept_evaluation_of_the_same_data_is_used_again(inside, data, tmp_path):
    run = (*MNIST, f"--run_dir={tmp_path}/run", f"--data_dir={data}", "--train_steps=4")
    inside(*run).ok()
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.manifest.json")
    manifest = json.loads(path.read_text())
    manifest["host_state"]["hooks"]["evaluation"]["result"] = {"loss": 12.5}
    path.write_text(json.dumps(with_digest(manifest)))
    moved = (*run[:-2], f"--data_dir={data.rename(tmp_path / 'moved')}", run[-1])  # the same files elsewhere
    again = inside(*moved).ok()
    assert shown(again) == "loss 12.5"
    assert not warnings(again)
    # So it was before checkpoints told of their data.
    del manifest["about"]["data"]
    path.write_text(json.dumps(with_digest(manifest)))
    other = inside(*run, f"--data_dir={images(tmp_path / 'other', train_count=300)}").ok()
    assert shown(other) == "loss 12.5"
    assert not warnings(other)


def from_seed(seed: int, examples: int, vocabulary=None, ids=None):
    features = np.random.default_rng(seed).random((examples, 3), np.float32)
    train, evaluation = (features, features[:, 0]), (features[:9], features[:9, 0])
    return lambda: crankshaft.Data(train, evaluation, vocabulary=vocabulary, ids=ids)


@pytest.mark.thorough
def test_a_scripts_dataset_of_another_length_is_refused_and_none_is_read(inside, tmp_path):
    run = (*QUIET, f"--run_dir={tmp_path}/run", "--mode=train")
    seen = []

    def data(examples):
        def one(i):
            tf.py_function(lambda i: seen.append(int(i)), [i], [])
            return tf.ones(3), tf.constant(1.0)

        made = tf.data.Dataset.range(examples).map(one).apply(tf.data.experimental.assert_cardinality(examples))
        return lambda: (made, from_seed(0, 9)().evaluation)

    inside(*run, "--train_steps=2", trainer=Line, data=data(40)).ok()
    seen.clear()
    assert "(examples: 40 -> 48)" in inside(*run, "--train_steps=4", trainer=Line, data=data(48)).mistake
    assert not seen
    inside(*run, "--train_steps=4", trainer=Line, data=data(40)).ok()


@pytest.mark.thorough
def test_a_scripts_ids_are_warned_of_unless_it_says_how_they_are_numbered(inside, tmp_path):
    def evaluated(name, *data):
        return inside("--mode=eval", f"--run_dir={tmp_path}/{name}", trainer=Line, data=from_seed(*data))

    for name, ids in (("unknown", None), ("known", "a b c")):
        run = (*QUIET, f"--run_dir={tmp_path}/{name}", "--train_steps=2")
        inside(*run, trainer=Line, data=from_seed(0, 40, {"user": 5}, ids)).ok()
    assert not warnings(evaluated("unknown", 0, 40, {"user": 5}).ok())
    (warned,) = warnings(evaluated("unknown", 1, 40, {"user": 5}).ok())
    assert warned.endswith("(as many examples, of other contents); if it numbers ids, they mean others now")
    assert not warnings(evaluated("unknown", 1, 40).ok())
    assert not warnings(evaluated("known", 1, 44, {"user": 5}, "a b c").ok())
    evaluated("known", 0, 40, {"user": 5}, "b a c").refused("the training data numbers ids otherwise than")


@pytest.mark.thorough
def test_a_complete_run_refuses_other_data_and_goes_on_or_is_opened_with_it(inside, tmp_path):
    def started(data, *flags):
        return inside(*QUIET, f"--run_dir={tmp_path}/run", *flags, trainer=Line, data=data)

    def rounded():
        data = from_seed(0, 40)()
        return crankshaft.Data(tuple(array * np.float32(1 + 1e-6) for array in data.train), data.evaluation)

    started(from_seed(0, 40), "--train_steps=2").ok()
    other = from_seed(1, 40)
    started(other, "--train_steps=2").refused(f"run_dir={tmp_path}/run is a complete run, of step 2, of other training")
    assert "other contents" in warnings(started(rounded, "--train_steps=2").ok())[0]
    with crankshaft.open_run(Line, data=other, run_dir=tmp_path / "run", train_steps=2, global_batch_size=8) as run:
        assert run.step == 2
    started(other, "--train_steps=2", "--allow_changed_config").ok()
    assert "resumed at step 2 of 4" in started(other, "--train_steps=4").ok().out


TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
IDS = np.arange(100, dtype=np.int32)
FORMS = {"arrays": lambda: (IDS, IDS), "dataset": lambda: tf.data.Dataset.from_tensor_slices((IDS, IDS))}
RUN = ("--jit=off", "--progress=plain", "--allow_changed_config")


class Count(Trainer):
    """Each time that an example is seen, its weight falls by the learning rate over the batch's examples."""

    def build_model(self):
        embedding = tf.keras.layers.Embedding(100, 1, embeddings_initializer="zeros")
        return tf.keras.Sequential([tf.keras.Input([], dtype="int32"), embedding])

    def loss(self, outputs, batch):
        return mean(outputs[..., 0])


@pytest.mark.parametrize(
    ("form", "devices"), [("arrays", ()), *(pytest.param(form, TWO, marks=pytest.mark.slow) for form in FORMS)]
)
def test_each_example_is_seen_once_an_epoch_and_epochs_end_where_they_do(inside, tmp_path, form, devices):
    """100 in batches of 10, then in six of 16 and one of 4."""
    ends = []

    def ran(*flags):
        hook = every_epoch(lambda status, means: ends.append((status.step, status.epoch)))
        flags = (*RUN, "--optimizer=sgd", "--learning_rate=1", *devices, *flags, f"--run_dir={tmp_path}")
        return inside(*flags, trainer=Count, data=lambda: (FORMS[form](), (IDS[:8], IDS[:8])), hooks=[hook])

    ran("--train_steps=4", "--global_batch_size=10").ok()
    line = ran("--train_steps=6", "--global_batch_size=16").mistake
    assert line.startswith("epoch 1 began with global_batch_size=10, ")
    assert line.endswith("resume with global_batch_size=10 up to step 10, where the epoch ends")
    ran("--train_epochs=1", "--global_batch_size=10").ok()
    assert "origin" not in manifests(tmp_path)[-1]["about"]
    out = ran("--train_steps=12", "--global_batch_size=16").ok().out
    assert "batch size 16, which was 10, from epoch 2 on" in out.splitlines()
    out = ran("--train_epochs=2", "--global_batch_size=16").ok().out  # within the epoch, once more
    assert "resumed at step 12 of 17" in out
    assert "which was" not in out
    lost = crankshaft.load_model(str(tmp_path)).weights[0].numpy()[:, 0]
    expected = {80 // 10 + 80 // 16: 96, 80 // 10 + 80 // 4: 4}
    assert collections.Counter(np.round(-80 * lost).astype(int).tolist()) == expected
    assert ends == [(10, 1), (17, 2)]
    assert result(tmp_path)["step"] == 17


@pytest.mark.thorough
def test_an_interruption_changes_no_bit_and_the_rate_goes_on_by_examples(inside, tmp_path):
    """After 5 of 20 steps of 20, two of which warm up: the rate falls on from where it is to where it ends."""
    rates: dict[int, float] = {}

    def note(status, means):
        rates[status.step] = float(status.state.trainer.optimizer.learning_rate)

    def ran(name, *flags, stop=0):
        def end(status, means):
            status.stop = "enough" if status.step == stop else status.stop

        flags = ("--learning_rate_schedule=cosine", "--learning_rate=1", "--warmup_steps=2", "--train_epochs=4", *flags)
        flags = (*RUN, *flags, f"--run_dir={tmp_path / name}")
        hooks = [every_steps(1, note), every_steps(1, end)]
        return inside(*flags, trainer=Count, data=lambda: ((IDS, IDS), None), hooks=hooks).ok().out

    for name in ("straight", "parts"):
        ran(name, "--global_batch_size=20", stop=5)
    out = ran("parts", "--global_batch_size=40", stop=7)
    assert "which was 20, from epoch 2 on; the learning-rate schedule continues by examples\n" in out
    ran("parts", "--global_batch_size=40")
    ran("straight", "--global_batch_size=40")
    np.testing.assert_equal(tensors(tmp_path / "parts"), tensors(tmp_path / "straight"))
    last = 5 + 3 * 3
    assert result(tmp_path / "straight")["step"] == last
    found = [rates[step] for step in range(5, last + 1)]
    examples = np.array([100, 140, 180, 200, 240, 280, 300, 340, 380, 400])
    progress = (examples // 20 - 2) / 18  # since the warm-up, in steps of 20 examples
    np.testing.assert_allclose(found, 0.5 * (1 + np.cos(np.pi * progress)), atol=1e-6)


@pytest.mark.thorough
def test_what_can_not_go_on_in_other_batches_is_one_line(inside, tmp_path):
    run = (*RUN, "--optimizer=sgd", "--train_steps=10", "--checkpoint_every_steps=5", "--global_batch_size=10")
    apart = (*TWO, "--sync_every_steps=5", f"--run_dir={tmp_path / 'apart'}")
    data = (IDS, IDS), None
    inside(*run, *apart, trainer=Count, data=lambda: data).ok()
    line = inside(*run, *apart, "--global_batch_size=40", trainer=Count, data=lambda: data).mistake
    assert line.startswith("global_batch_size=40: from step 10 on epochs would end between two syncs (sync_every_st")
    inside(*run, f"--run_dir={tmp_path / 'one'}", trainer=Count, data=lambda: data).ok()
    how = {"train_steps": 14, "global_batch_size": 20, "allow_changed_config": True, "jit": "off", "optimizer": "sgd"}
    with crankshaft.open_run(Count, data=data, run_dir=str(tmp_path / "one"), progress="off", **how) as opened:
        with pytest.raises(crankshaft.UsageError, match="ckpt-5 was written before batches of 20 began, at step 10"):
            opened.restore(5)
        opened.train(steps=2)
        assert opened.step == 12
