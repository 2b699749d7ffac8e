"""A reader beside a run that writes checkpoints and keeps one reads a whole one, whenever the run replaces it."""

import os
import threading

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, load_weights
from tests.waiting import PATIENCE


class Pair(tf.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.first, self.second = tf.Variable([value] * 3), tf.Variable([[value]])


class Accesses:
    """Counts accesses to a directory's files, by Python and by TensorFlow, and calls `write` before number `at`."""

    def __init__(self, monkeypatch, directory, write):
        self._directory, self._write = os.fspath(directory), write
        self.count, self.at, self._is_writing = 0, None, False
        of_tensorflow = ((tf.train, "load_checkpoint"), (tf.raw_ops, "RestoreV2"))
        for owner, name in (*((os, name) for name in ("listdir", "stat", "lstat", "open")), *of_tensorflow):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function):
        def call(*arguments, **how):
            path = str(how["prefix"] if "prefix" in how else arguments[0] if arguments else "")
            if path.startswith(self._directory) and not self._is_writing:
                self.count += 1
                if self.count == self.at:
                    self.write()
            return function(*arguments, **how)

        return call

    def write(self):
        self._is_writing = True
        self._write()
        self._is_writing = False


def by_weights(directory, pair):
    load_weights(directory, pair, "trainer.pair")


def by_restore(directory, pair):
    trainer = tf.train.Checkpoint(pair=pair)
    reader = Checkpoints(directory / "checkpoints", tf.train.Checkpoint(trainer=trainer), keep=None, about={})
    assert reader.restore() is not None


@pytest.mark.parametrize("again", [False, True], ids=["newer steps", "the same step"])
@pytest.mark.parametrize("read", [by_weights, pytest.param(by_restore, marks=pytest.mark.thorough)])
def test_a_reader_gets_one_whole_checkpoint_whenever_the_writer_replaces_it(tmp_path, monkeypatch, caplog, read, again):
    written = Pair()
    state = tf.train.Checkpoint(trainer=tf.train.Checkpoint(pair=written))
    writer = Checkpoints(tmp_path / "checkpoints", state, keep=1, about={})
    saves = iter(range(1, 10_000))

    def write():
        value = next(saves)
        written.first.assign([float(value)] * 3)
        written.second.assign([[float(value)]])
        writer.save(7 if again else value, {}, wait=True, force=True)

    accesses = Accesses(monkeypatch, tmp_path / "checkpoints", write)
    accesses.write()
    moments = 0
    while accesses.at is None or accesses.count >= accesses.at:
        moments += 1
        accesses.count, accesses.at = 0, moments
        pair = Pair(-1.0)
        read(tmp_path, pair)
        values = {float(value) for variable in (pair.first, pair.second) for value in tf.reshape(variable, [-1])}
        assert values in ({float(moments)}, {float(moments + 1)}), moments
    assert moments > 10
    assert "broken" not in caplog.text


def test_a_reader_waits_while_the_only_checkpoint_is_written_over(tmp_path, monkeypatch):
    written, found = Pair(1.0), Pair()
    state = tf.train.Checkpoint(trainer=tf.train.Checkpoint(pair=written))
    writer = Checkpoints(tmp_path / "checkpoints", state, keep=1, about={})
    writer.save(7, {}, wait=True)
    replace, half_way, looked = os.replace, threading.Event(), threading.Event()

    def replace_and_wait(source, to):
        replace(source, to)
        if str(to).endswith(".index"):  # of two files the first is the new checkpoint's, the second the old one's
            half_way.set()
            assert looked.wait(PATIENCE)

    def look(_):
        looked.set()

    monkeypatch.setattr(os, "replace", replace_and_wait)
    monkeypatch.setattr("time.sleep", look)  # the reader's pause between two looks
    written.first.assign([2.0] * 3)
    written.second.assign([[2.0]])
    writer.save(7, {}, force=True)
    assert half_way.wait(PATIENCE)
    load_weights(tmp_path, found, "trainer.pair")
    writer.wait()
    assert [*found.first.numpy(), *found.second.numpy().ravel()] == [2.0] * 4
