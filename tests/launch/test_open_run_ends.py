"""How an open run ends: by its program's errors, by signals, within a call and between two."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import UsageError, open_run, run
from crankshaft.engine.hooks import every_steps
from tests.launch.test_open_run import ASKED, HEIGHTS, POINTS, Noisy, Points, assert_same, weights


def ended_by(error: type[BaseException], end, tmp_path) -> crankshaft.Run:
    with pytest.raises(error), open_run(Noisy, run_dir=tmp_path / "run", **ASKED) as opened:  # noqa: PT012
        opened.train(steps=5)
        end(opened)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == opened.step
    return open_run(Noisy, run_dir=tmp_path / "run", **ASKED)


def test_a_run_is_saved_where_its_program_fails_between_calls(tmp_path):
    with ended_by(ZeroDivisionError, lambda opened: 1 / 0, tmp_path) as opened:
        assert opened.step == 5


@pytest.mark.usefixtures("answers_ctrl_c")
def test_ctrl_c_ends_a_call_at_a_step_and_the_run_is_saved(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def interrupt(opened):
        started = opened.step

        def once_it_trains():
            while opened.step == started:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=once_it_trains).start()
        opened.train(steps=10_000_000)

    with ended_by(KeyboardInterrupt, interrupt, tmp_path) as opened:
        assert 5 < opened.step < 10_000_000
        step = opened.step
        with pytest.raises(KeyboardInterrupt):
            interrupt(opened)
        opened.train(steps=1)  # a program that catches it goes on
        assert opened.step > step
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def in_train(opened):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    opened.train(steps=10_000_000)


def between_calls(opened):
    opened.train(steps=4)
    os.kill(os.getpid(), signal.SIGTERM)


class Ending(Points):
    """A source whose reading is ended by SIGTERM, once."""

    def read(self, indices):
        if not self.__dict__.setdefault("sent", False):
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().read(indices)


def in_evaluate(opened):
    opened.train(steps=4)
    with pytest.raises(UsageError, match=r"evaluate\(\): the run ends, since a process got SIGTERM"):
        opened.evaluate(Ending())


def in_predict(opened):
    opened.train(steps=4)
    with pytest.raises(UsageError, match=r"predict\(\): the run ends, since a process got SIGTERM"):
        opened.predict(Ending())


@pytest.mark.parametrize("send", [in_train, between_calls, in_evaluate, in_predict])
def test_sigterm_saves_and_closes_a_run_before_it_does_what_the_program_wants(tmp_path, send):
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(opened.stop))
    try:
        with open_run(Noisy, run_dir=tmp_path / "run", eval_batch_size=8, **ASKED) as opened:
            send(opened)
            with pytest.raises(UsageError, match="the run is closed"):
                opened.train(steps=1)
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["SIGTERM"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == opened.step > 0
    assert (tmp_path / "run" / "checkpoints" / f"ckpt-{opened.step}.index").exists()


def test_a_call_that_failed_is_not_saved_and_can_be_taken_back(tmp_path):
    asked = {**ASKED, "run_dir": tmp_path / "run", "optimizer": "sgd"}
    with open_run(Noisy, **asked) as opened:
        opened.train(steps=5)
        opened.save()
        before = weights(opened)
        opened.trainer.model.variables[0].assign(opened.trainer.model.variables[0] * np.inf)
        with pytest.raises(crankshaft.RunError, match="loss is nan"):
            opened.train(steps=5)
        opened.restore("latest")
        opened.train(steps=1)
        opened.restore(5)
        for mine, theirs in zip(weights(opened), before, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        opened.trainer.model.variables[0].assign(opened.trainer.model.variables[0] * np.inf)
        with pytest.raises(crankshaft.RunError, match="loss is nan"):
            opened.train(steps=5)
        with pytest.raises(crankshaft.RunError, match=r"variable \S+ is not finite"):
            opened.close()
    assert sorted(path.name for path in pathlib.Path(opened.run_dir, "checkpoints").glob("*.index")) == ["ckpt-5.index"]


class Flaky(Points):
    """A source that fails when it is read for the second time, and for no other."""

    def __init__(self):
        self.reads = 0

    def read(self, indices):
        self.reads += 1
        if self.reads == 2:
            raise OSError("the disk was away")
        return super().read(indices)


def fails_once(status, metrics, seen=[]):  # noqa: B006
    seen.append(status.step)
    if seen == [4, 8]:
        raise OSError("the disk was away")


@pytest.mark.parametrize("where", ["hook", "own data", "given data"])
def test_a_program_that_catches_an_error_goes_on_and_loses_no_step(where, tmp_path):
    """The hooks after one that failed see its step too: the checkpoint that was due there is written."""
    hooks = [every_steps(4, fails_once)] if where == "hook" else []
    asked = {**ASKED, "run_dir": tmp_path / "run", "checkpoint_every_steps": 8, "seed": 3}
    asked |= {"data": lambda: (Flaky(),), "mode": "train", "resident_data_mb": 0} if where == "own data" else {}
    given = {"data": Flaky()} if where == "given data" else {}
    with open_run(Noisy, hooks=hooks, **asked) as opened:
        with pytest.raises(Exception, match="the disk was away"):  # noqa: PT012
            while opened.step < 12:
                opened.train(steps=3, **given)
        assert opened.step < 12
        opened.train(steps=20 - opened.step, **given)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 20
    kept = [path.name for path in pathlib.Path(opened.run_dir, "checkpoints").glob("*.index")]
    assert {"ckpt-8.index", "ckpt-16.index", "ckpt-20.index"} <= {*kept}
    if not given:
        own = {name: asked[name] for name in ("mode", "resident_data_mb") if name in asked}
        split = {"data": lambda: (Points(),)} if own else {}
        assert_same(opened, run(Noisy, train_steps=20, **{**ASKED, **own, **split, "seed": 3}))


def test_a_run_that_was_interrupted_within_its_steps_is_not_saved_and_says_so(tmp_path):
    failing = []

    def simulated():
        for number in range(200):
            if number == 150 and not failing:
                failing.append(number)
                raise OSError("the simulator is lost")
            yield POINTS[number], HEIGHTS[number]

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    stream = tf.data.Dataset.from_generator(simulated, output_signature=spec)
    stream = stream.apply(tf.data.experimental.assert_cardinality(200))
    asked = {**ASKED, "data": lambda: (stream,), "run_dir": tmp_path / "run", "mode": "train", "shuffle_buffer": 0}
    opened = open_run(Noisy, **asked)
    opened.train(steps=2)
    opened.save()
    with pytest.raises(Exception, match="the simulator is lost"):
        opened.train(steps=5)
    with pytest.raises(crankshaft.RunError, match=r"could not be written: the call after it was interrupted"):
        opened.save()
    opened.restore("latest")
    opened.train(steps=5)
    opened.save()
    opened.close()
    failing.clear()
    opened = open_run(Noisy, **asked)
    assert opened.step == 7
    with pytest.raises(Exception, match="the simulator is lost"):
        opened.train(steps=7)
    with pytest.raises(crankshaft.RunError, match=r"restore a checkpoint"):
        opened.close()
