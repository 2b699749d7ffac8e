"""TensorBoard's event files: each step once over kills and restarts, written by a thread that ends no run."""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from crankshaft.engine.hooks import saving
from crankshaft.engine.hooks.evaluation import Evaluation
from crankshaft.engine.metrics.sums import LoopSums
from crankshaft.parts.tensorboard import TensorBoard, event_values
from crankshaft.parts.tensorboard.event_files import EventFiles
from tests.limits import files_no_larger_than
from tests.parts.tensorboard.boards import Every, raw_events, scalars

pytestmark = pytest.mark.thorough


def test_resume_after_a_kill_has_each_step_once(made, tmp_path):
    """Killed at step 8 with a checkpoint of step 4: the steps from there on are trained, and written, a second time."""
    board = tmp_path / "tensorboard"
    straight = made()
    straight.loop([Evaluation(2), TensorBoard(tmp_path / "straight", 2)], 12)

    def hooks_of(bench):
        hooks = [Evaluation(2), TensorBoard(board, 2)]
        return bench.saves(tmp_path / "checkpoints", hooks, 4), hooks

    class Killed(Exception):
        pass

    class Kill(Every):
        def __call__(self, status):
            if status.step == 8:
                hooks[1].before_save(status)  # what was put is on disk, as if its time had come
                raise Killed

    bench = made()
    saved, hooks = hooks_of(bench)
    with pytest.raises(Killed):
        bench.loop([*hooks[:-1], Kill(8), hooks[-1]], 12)
    saved.wait()
    assert list(scalars(board / "train")["loss"]) == [2, 4, 6, 8]
    with open(board / "train" / os.listdir(board / "train")[0], "ab") as file:
        file.write(b"half a record")

    resumed = made()
    saved, hooks = hooks_of(resumed)
    assert saving.restore(saved, resumed.state, hooks).step == 4
    resumed.loop(hooks, 12)
    for folder in ("train", "eval"):
        expected = scalars(tmp_path / "straight" / folder)
        for tag in ("loss", "accuracy"):
            assert scalars(board / folder)[tag] == expected[tag]


def test_a_tensorboard_that_runs_meanwhile_shows_each_step_once(tmp_path):
    """The loader of --load_fast=false, which keeps what it has read until an event of a later file takes it back."""
    loader = EventAccumulator(str(tmp_path / "train"))
    for resumed_at, written, shown in ((None, (1, 2, 3), [1, 2, 3]), (1, (2, 3, 4), [1, 2, 3, 4]), (None, (1,), [1])):
        files = EventFiles(str(tmp_path))
        files.open(resumed_at)
        for step in written:
            files.put("train", step, lambda: event_values.scalars({"a": 1.0}))
        files.close()
        loader.Reload()
        assert [event.step for event in loader.Tensors("a")] == shown


def test_events_are_on_disk_before_a_checkpoint_is(made, tmp_path):
    class NoEnd(TensorBoard):
        def end(self, status):
            seen.append(list(scalars(tmp_path / "train")["loss"]))
            super().end(status)

    seen = []
    bench = made()
    hooks = [NoEnd(tmp_path, 2)]
    bench.saves(tmp_path / "checkpoints", hooks, 4)
    bench.loop(hooks, 4)
    assert seen == [[2, 4]]


def test_sums_are_read_in_the_writers_thread_and_not_in_the_hook(made, tmp_path, monkeypatch):
    read = LoopSums.read
    in_hook, elsewhere = [], set()

    class Watched(TensorBoard):
        def __call__(self, status):
            in_hook.append(0)
            super().__call__(status)
            in_hook.append(None)

    def spy(sums):
        thread = threading.current_thread().name
        if thread != "MainThread":
            elsewhere.add(thread)
        elif in_hook and in_hook[-1] is not None:
            in_hook[-1] += 1
        return read(sums)

    monkeypatch.setattr(LoopSums, "read", spy)
    made().loop([Watched(tmp_path, 2)], 6)
    assert set(in_hook) == {0, None}
    assert elsewhere == {"writer"}


def test_files_that_cannot_be_written_are_warned_of_once_and_end_no_run(made, tmp_path, caplog):
    (tmp_path / "train").write_text("a file where the folder should be")
    with caplog.at_level("WARNING", logger="crankshaft"):
        assert made().loop([TensorBoard(tmp_path, 1)], 4).step == 4
    (line,) = [r.getMessage() for r in caplog.records if str(tmp_path) in r.getMessage()]
    assert re.search(r"can't be written \(.*exists", line)


def test_a_disk_that_is_full_for_a_while_leaves_a_gap_and_a_line(tmp_path, caplog):
    def put(*steps):
        for step in steps:
            files.put("train", step, lambda: event_values.scalars({"a": 1.0}))
            files.flush()

    files = EventFiles(str(tmp_path))
    with caplog.at_level("WARNING", logger="crankshaft"):
        files.open(4)
        put(5, 6)
        (name,) = os.listdir(tmp_path / "train")
        with files_no_larger_than((tmp_path / "train" / name).stat().st_size + 10):  # room for a part of an event
            put(7)
        with files_no_larger_than(10):
            put(8, 9)
        put(10, 11)
        files.close()
    assert list(scalars(tmp_path / "train")["a"]) == [5, 6, 10, 11]
    assert [e.step for e in raw_events(tmp_path / "train") if e.HasField("session_log")] == [5]
    (record,) = caplog.records
    assert "can't be written" in record.getMessage()


@pytest.mark.parametrize("error", [MemoryError(), tf.errors.ResourceExhaustedError(None, None, "the disk is full")])
def test_an_event_that_fails_ends_neither_the_writers_thread_nor_the_run(tmp_path, caplog, error):
    def fail():
        raise error

    files = EventFiles(str(tmp_path))
    with caplog.at_level("WARNING", logger="crankshaft"):
        files.open(None)
        files.put("train", 1, fail)
        files.flush()  # returns, though nothing can be written
        files.close()
    what = str(error) or "MemoryError"
    (record,) = caplog.records
    assert f"can't be written ({what})" in record.getMessage()


def test_a_file_is_read_after_those_of_a_clock_that_was_ahead(tmp_path):
    """TensorBoard goes from a file to those whose names come later."""
    for step in (1, 2, 3):
        files = EventFiles(str(tmp_path))
        files.open(step - 1)
        files.put("train", step, lambda: event_values.scalars({"a": 1.0}))
        files.close()
        if step == 1:
            (file,) = (tmp_path / "train").iterdir()
            file.rename(file.with_name("events.out.tfevents.3000000000.999999.host.1"))
    assert list(scalars(tmp_path / "train")["a"]) == [1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_values_of_pictures_outside_of_their_range_are_clipped(dtype):
    """Also beside a NaN, whose pixel is black."""
    shown = np.array([0.0, 1.0, 0.4, -0.5, 7.0, np.nan, np.inf, -np.inf], dtype).reshape(1, 2, 4, 1)
    (value,) = event_values.images("errors", shown)
    drawn = tf.io.decode_png(tf.make_ndarray(value.tensor)[2])
    assert drawn.numpy().ravel().tolist() == [0, 255, 102, 0, 255, 0, 255, 0]


def test_inputs_of_a_larger_range_are_pictures_of_all_of_it():
    features = np.array([-2.0, 0.0, 2.0, np.nan], np.float32)
    np.testing.assert_array_equal(event_values.shades(features), [0.0, 0.5, 1.0, np.nan])
    for unchanged in (features.clip(0, 1), features.clip(0, 1)[3:], np.array([0, 255], np.uint8)):
        assert event_values.shades(unchanged) is unchanged
