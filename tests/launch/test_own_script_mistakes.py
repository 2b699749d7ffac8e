"""Mistakes that only data, a run or a machine shows, TensorFlow running: one line all the same."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError, load_model
from crankshaft.engine import mean, step_context
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.strategies import devices
from crankshaft.engine.strategies.replicated import largest_divisor
from crankshaft.launch.errors import EXIT_DIVERGED
from tests.launch.line import FEATURES, LABELS, RUN, Line, data, location_of


@pytest.mark.parametrize(
    ("splits", "says"),
    [
        (None, "the data function gave None; return (train, eval)"),
        (tuple(range(10)), "the data function gave 10 values; return (train, eval)"),
        ((FEATURES, LABELS), "the train data is a ndarray; give (features, labels)"),
        ((FEATURES, LABELS), "((features, labels), None) is training data alone"),
        (((FEATURES, LABELS), 3), "the eval data is a int; give (features, labels)"),
        (((FEATURES, LABELS, LABELS, 1), None), "the train data is 4 values; give (features, labels)"),
        (((FEATURES, LABELS), (FEATURES,)), "the train data has labels, and the eval data has features; give both in"),
        (({"a": FEATURES}, {"b": FEATURES}), "the train data has features['a'], and the eval data has features['b']"),
        (((FEATURES, LABELS, LABELS), None), "a weight of the train data is negative or not finite; give numbers of"),
        (((FEATURES, LABELS, 0 * LABELS), None), "all weights of the train data are 0"),
        (((FEATURES, LABELS, FEATURES), None), "the weights of the train data, its third part, are of shape [1] an"),
        (((FEATURES, LABELS, LABELS[1:]), None), "the train data has arrays of 32, 32, 31 examples"),
        (((FEATURES, LABELS, {"a": LABELS}), None), "the weights of the train data, its third part, are a dict"),
        (((FEATURES, LABELS, LABELS.astype(str)), None), "the weights of the train data, its third part, are of type"),
        (((FEATURES.astype(object), LABELS), None), "has an array of Python objects (features), a float among them"),
        ((({"day": FEATURES.astype("M8[s]")}, LABELS), None), "has an array of datetime64[s] (features['day']), which"),
        (((FEATURES, LABELS[:-1]), (FEATURES, LABELS)), "the train data has arrays of 32, 31 examples"),
        (((FEATURES, LABELS), ({"a": FEATURES, "b": FEATURES[:3]}, LABELS)), "the eval data has arrays of 32, 3, 32"),
        (((FEATURES[:0], LABELS[:0]), (FEATURES, LABELS)), "the train data has no examples"),
        (((FEATURES, LABELS), (FEATURES[:0], LABELS[:0])), "the eval data has no examples"),
        (((FEATURES, 3), (FEATURES, LABELS)), "the train data"),
        (((FEATURES, "label"), (FEATURES, LABELS)), "the train data"),
        (((FEATURES + 1j, LABELS), (FEATURES, LABELS)), "the train data holds complex numbers (complex64)"),
    ],
)
def test_data_that_cannot_be_used_is_described(inside, splits, says):
    assert says in inside(*RUN, trainer=Line, data=lambda: splits).mistake


def test_an_empty_or_endless_dataset_is_refused(inside):
    whole = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    outcome = inside(*RUN, trainer=Line, data=lambda: (whole.take(0), whole))
    assert "the train data is an empty dataset" in outcome.error
    outcome = inside(*RUN, trainer=Line, data=lambda: (whole.repeat(), whole))
    assert "never ends" in outcome.mistake
    assert "dataset.take" in outcome.error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda whole: whole.map(lambda x, y: (tf.cast(x, tf.complex64), y)),
            "the train data holds complex numbers (complex64)",
        ),
        (lambda whole: whole.map(lambda x, y: x), "the eval data has labels, and the train data has features; give"),
        (lambda whole: whole.map(lambda x, y: (x, y, y, y)), "the train dataset's elements are 4 values; give (feat"),
        (lambda whole: whole.map(lambda x, y: (x, y, x)), "the weights of the train data, its third part, are of sha"),
        (lambda whole: whole.map(lambda x, y: (x, y, y)), "a weight of the train data is negative or not finite"),
        (
            lambda whole: whole.map(lambda x, y: (tf.repeat(x, tf.random.uniform([], 1, 3, tf.int32)), y)),
            "the train dataset's examples are of shape (None,) (features); give examples of one shape: "
            "dataset.unbatch(); in dataset.map, tf.pad where they differ, then tf.ensure_shape",
        ),
        (  # as tf.ragged.constant's rows are, of which `map` gets tensors
            lambda whole: tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [1.0, 2.0]]), [1.0, 2.0])),
            "the train dataset's examples are of shape (None,); give examples of one shape: dataset.unbatch(); "
            "in dataset.map, tf.pad where they differ, then tf.ensure_shape",
        ),
        (
            lambda whole: whole.map(lambda x, y: (tf.RaggedTensor.from_row_lengths(x, [1]), y)),
            "the train dataset holds a RaggedTensorSpec; give dense tensors: in dataset.map, pad a ragged x "
            "to one shape for all by x.to_tensor(shape=[most, ...])",
        ),
    ],
)
def test_a_dataset_of_other_elements_is_described(inside, change, says):
    whole = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    assert says in inside(*RUN, trainer=Line, data=lambda: (change(whole), whole)).mistake


def test_an_export_without_a_model_says_what_is_served(inside, tmp_path):
    class Named(Line):
        def build(self):
            super().build()
            self.line = self.model
            del self.model

        def train_step(self, batch):
            return {"loss": self.loss(self.line(batch[0]), batch)}

        eval_step = train_step

    inside(*RUN, "--mode=train", f"--run_dir={tmp_path}", trainer=Named, data=data).ok()
    outcome = inside("--mode=export", f"--run_dir={tmp_path}", trainer=Named, data=data)
    assert "--mode=export serves Named.model, and there is none" in outcome.mistake


@pytest.mark.parametrize(
    ("prints", "says"), [("[N/A]", "invalid literal"), (None, "No such file"), ("", "empty")], ids=str
)
def test_a_gpu_is_split_by_what_the_driver_says_is_free(prints, says):
    assert devices.free_gpu_memory_mb(("printf", "81000\\n79000\\n")) == 79000
    with pytest.raises(UsageError) as failed:
        devices.free_gpu_memory_mb(("no-such-program",) if prints is None else ("printf", prints))
    assert says in str(failed.value)
    assert "leave num_virtual_devices out" in str(failed.value)


def test_an_evaluation_batch_of_one_shape_divides_over_the_replicas():
    assert largest_divisor(360, 512, 8) == 360
    assert largest_divisor(1000, 100, 8) == 40
    assert largest_divisor(997, 100, 8) == 96  # a prime: its last 37 are left out
    assert largest_divisor(997, 3, 8) == 8


def test_a_bug_in_the_data_function_names_its_file_and_line(inside):
    def broken():
        return np.load("no/such/file.npy")

    outcome = inside(*RUN, trainer=Line, data=broken)
    assert location_of(broken) in outcome.mistake
    assert "no/such/file.npy" in outcome.error


def test_a_failed_run_writes_its_error_as_its_result_and_a_mistake_before_it_none(inside, tmp_path):
    def fails(status, means):
        if status.step == 3:
            raise ConnectionError("the tracker is down")

    flags = (*RUN, f"--run_dir={tmp_path}")
    mistake = inside(*flags, trainer=Line, data=lambda: 1 / 0)
    assert mistake.code == 2
    assert not (tmp_path / "result.json").exists()
    failed = inside(*flags, trainer=Line, data=data, hooks=[every_steps(1, fails)])
    result = json.loads((tmp_path / "result.json").read_text())
    assert (failed.code, result["exit_code"], result["step"], result["error"]) == (
        1,
        1,
        3,
        failed.error.partition(";")[0],
    )
    inside(*flags, trainer=Line, data=data).ok()
    result = json.loads((tmp_path / "result.json").read_text())
    assert "error" not in result
    assert result["stop"] is None  # it ran to its end


def test_a_network_that_is_down_may_be_up_the_next_time(inside):
    """So the code is not the one that says: do not start this again."""

    def broken():
        raise ConnectionResetError(104, "Connection reset by peer")

    outcome = inside(*RUN, trainer=Line, data=broken)
    assert outcome.code == 1
    assert location_of(broken) in outcome.error


def test_a_default_that_is_no_json_is_kept_by_its_name(inside, tmp_path):
    """Alike in each process: the run resumes."""

    class Bent(Line):
        def __init__(self, activation=tf.nn.relu, dtype=tf.float32):
            super().__init__()

    run = (*RUN, f"--run_dir={tmp_path}")
    inside(*run, trainer=Bent, data=data).ok()
    assert "relu" in (tmp_path / "config.json").read_text()
    assert "complete" in inside(*run, trainer=Bent, data=data).ok().out


def test_a_classifier_on_data_without_classes_says_so(inside):
    outcome = inside("--model=logistic", *RUN, data=data)
    assert "logistic needs num_classes, and the data has none: its labels are float32, -2.0 among them" in outcome.error
    assert outcome.error.rstrip().endswith("; give (train, eval, num_classes), with classes, numbered from 0")
    outcome = inside("--model=logistic", *RUN, data=lambda: (({"a": FEATURES, "b": FEATURES}, LABELS), None, 2))
    assert "logistic takes one array of features, and the data has several (a, b); give one array" in outcome.mistake


def test_what_columns_of_a_table_lack_for_a_classifier_is_named(inside, tmp_path):
    run = ("--model=logistic", "--input=csv", f"--data_dir={tmp_path}/rows.csv", "--validation_split=0.5", *RUN)
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "0.5,1.5,1\n0.1,0.2,0\n" * 8)
    assert "the data has several (a, b); add --input_arg=array=true, which makes one" in inside(*run).mistake
    for label in ("0.5", "1000000000000000000", "-3"):
        (tmp_path / "rows.csv").write_text(f"a,b,label\n0.5,1.5,{label}\n" + "0.5,1.5,1\n" * 8)
        outcome = inside(*run, "--input_arg=array=true")
        assert f"{label}" in outcome.mistake
        assert "among them; give labels that are classes, numbered from 0" in outcome.error


@pytest.mark.slow
def test_a_model_that_no_memory_has_room_for_is_named_and_not_the_batch(inside):
    outcome = inside("--model=mlp", "--model_arg=hidden_units=2000000000", "--input=digits", *RUN)
    assert outcome.code == 1
    assert "mlp --model_arg=hidden_units=[2000000000] does not fit into memory (OOM when" in outcome.error
    assert "batch" not in outcome.error


def test_a_rank_that_makes_no_gradient_smaller_is_refused(inside):
    run = ("--strategy=mirrored", "--num_virtual_devices=2", "--powersgd_rank=999999", "--input=digits", *RUN)
    outcome = inside("--model=logistic", *run)
    assert "--powersgd_rank=999999: no gradient of logistic is smaller as two matrices of this rank" in outcome.mistake


def test_a_monitor_that_is_not_measured_is_answered_with_those_that_are(inside):
    outcome = inside(*RUN, "--monitor=eval_acuracy", "--early_stopping=patience=1", trainer=Line, data=data)
    assert "--monitor=eval_acuracy is not measured in this run; use one of eval_loss" in outcome.mistake


def test_a_model_that_is_not_the_scripts_is_refused(inside):
    outcome = inside(*RUN, "--model=cnn", trainer=Line, data=data)
    assert "--model=cnn is given, but this script trains Line" in outcome.mistake


def test_mirrored_without_a_gpu_says_how_to_have_replicas(inside):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    outcome = inside(*RUN, "--strategy=mirrored", trainer=Line, data=data)
    assert "found no GPU; use --num_virtual_devices=N" in outcome.mistake


@pytest.mark.parametrize("address", [pytest.param("", marks=pytest.mark.slow), "grpc://127.0.0.1:1"])
def test_tpu_without_a_tpu_says_so_and_waits_for_none(crank, address, monkeypatch):
    monkeypatch.setenv("TPU_NAME", address)
    outcome = crank("--model=logistic", "--input=digits", "--strategy=tpu")
    assert f"--strategy=tpu found no TPU at {address or 'this host'}" in outcome.mistake


def test_a_layer_that_does_not_fit_is_said_in_plain_letters_with_its_place(inside):
    tiny = ("--input=synthetic", "--input_arg=shape=3,3,1", "--input_arg=examples=9")
    outcome = inside("--model=cnn", *tiny, *RUN)
    assert "output size would be zero or negative" in outcome.mistake
    assert "\x1b" not in outcome.error


def test_a_checkpoint_that_cannot_be_written_fails_the_run_and_says_where(inside, tmp_path):
    def meanwhile():
        (tmp_path / "checkpoints").touch()
        return data()

    outcome = inside(*RUN, f"--run_dir={tmp_path}", trainer=Line, data=meanwhile)
    assert outcome.code == 1  # not 2: the next try may find room
    assert f"ckpt-4 could not be written to {tmp_path}/checkpoints" in outcome.error


def test_a_run_whose_checkpoints_are_all_broken_does_not_begin_anew(inside, tmp_path):
    run = (*RUN, "--mode=train", f"--run_dir={tmp_path}")
    inside(*run, trainer=Line, data=data).ok()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "best")
    (written,) = (tmp_path / "checkpoints").glob("ckpt-4.data*")
    os.truncate(written, 10)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    outcome = inside(*run, trainer=Line, data=data)
    assert f"no checkpoint in {tmp_path}/checkpoints can be read ({written.name}: expected" in outcome.mistake
    assert (
        f"begin in another --run_dir, from the start or, with --init_from, from {tmp_path}/best or other weights"
        in outcome.error
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == found
    outcome = inside("--mode=eval", f"--run_dir={tmp_path}", trainer=Line, data=data)
    assert f"--run_dir={tmp_path} has no whole checkpoint (latest); {written.name}: expected" in outcome.error
    with pytest.raises(UsageError, match=f"{tmp_path} has no whole checkpoint latest; {written.name}: expected"):
        load_model(tmp_path)
    for path in (tmp_path / "checkpoints").glob("*.manifest.json"):
        path.unlink()  # as a copy without JSON files leaves it out
    shutil.rmtree(tmp_path / "best")
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    outcome = inside(*run, trainer=Line, data=data)
    assert "has checkpoint files that no manifest lists" in outcome.mistake
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left


def test_ctrl_c_before_the_first_step_is_one_line_and_saves_nothing(inside, tmp_path):
    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return data()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        outcome = inside(*RUN, f"--run_dir={tmp_path}", trainer=Line, data=interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 130
    assert "interrupted" in outcome.error
    assert not (tmp_path / "config.json").exists()


def test_a_script_that_processes_import_without_a_guard_is_named_and_no_pool_starts_others_for_ever(crank, tmp_path):
    (script := tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "from crankshaft.launch import train\n"
        "if multiprocessing.current_process().name == 'MainProcess':\n"  # as its data function would, once it trains
        "    multiprocessing.get_context('spawn').Pool(1).map(abs, range(4))\n"
        "train.main(argv=['script', '--model=mlp', '--input=digits'])\n"
    )
    outcome = crank(script=script, tensorflow=False)
    assert outcome.code == -signal.SIGTERM
    assert outcome.error.startswith("the script starts a process by `multiprocessing`, which imports the script")
    assert outcome.error.endswith('put what starts the run below `if __name__ == "__main__":`')


def test_a_loss_that_is_not_finite_ends_the_run_with_another_code(inside, tmp_path):
    class Exploding(Line):
        def loss(self, outputs, batch):
            return mean((1 + tf.square(outputs[:, 0])) / tf.cast(step_context().step < 2, tf.float32))

    copy = f"--result_json={tmp_path}/copy.json"
    outcome = inside(*RUN, "--steps_per_loop=1", f"--run_dir={tmp_path}", copy, trainer=Exploding, data=data)
    assert outcome.code == EXIT_DIVERGED == 65
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == json.loads((tmp_path / "copy.json").read_text())
    assert (result["error"], result["exit_code"], result["mode"]) == (outcome.error, 65, "train_and_eval")
    assert result["step"] in (3, 4)
    assert "is inf" in outcome.error
    assert "learning rate" in outcome.error
    assert not list((tmp_path / "checkpoints").glob("ckpt-4*"))  # such a state is not kept


def test_labels_that_make_pairs_with_the_outputs_are_refused_with_both_shapes(inside):
    class Broadcast(Line):
        def loss(self, outputs, batch):
            return mean(tf.square(outputs - batch[1]))

    outcome = inside(*RUN, trainer=Broadcast, data=lambda: ((FEATURES, LABELS),) * 2)
    assert outcome.code == 2
    assert "Broadcast.loss: values [n, 1] and [n] of n examples broadcast to [n, n]" in outcome.error
    assert "(outputs are [n, 1], labels [n])" in outcome.error


@pytest.mark.parametrize(
    "how",
    ["dense", pytest.param("cast", marks=pytest.mark.slow), pytest.param("scaled", marks=pytest.mark.slow), "ids"],
)
def test_whole_numbers_that_float32_cannot_hold_are_warned_of_where_they_become_floats(inside, how):
    class Timed(Line):
        def forward(self, features, training):
            times = features["time"]
            times = {"ids": times % 100, "scaled": times - 1_700_000_000}.get(how, times)
            times = times if how == "dense" else tf.cast(times, tf.float32)
            return self.model(times, training=training)

        def build_model(self):
            model = super().build_model()
            model.build((None, 1))
            return model

    times = 1_700_000_000 + np.arange(32)[:, np.newaxis]
    split = {"time": times, "small": times % 7}, LABELS
    outcome = inside(*RUN, "--learning_rate=0", trainer=Timed, data=lambda: (split, split)).ok()
    warning = "time: whole numbers up to 1,700,000,031 become float32 in the model, which represents them exactly up to"
    assert outcome.err.count(f"{warning} 16,777,216") == (how in ("dense", "cast"))
    assert "small: whole" not in outcome.err
