"""An evaluator beside a run reads what is new, and nothing else."""

import os
import types

import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.checkpoints.graph import Matching
from crankshaft.launch.run.modes import evaluator

CONFIG: dict = {"flags": {}, "deciding": {}}


class State(tf.train.Checkpoint):
    def restore_host_state(self, host_state):
        pass

    def parts(self, manifest):
        return []

    def matching(self, manifest):
        return Matching()


def test_each_checkpoint_is_hashed_once_however_many_are_kept(tmp_path, monkeypatch):
    writer = Checkpoints(tmp_path / "checkpoints", State(value=tf.Variable(1.0)), keep=None, about=CONFIG)
    state = State(value=tf.Variable(0.0))
    session = types.SimpleNamespace(
        config=types.SimpleNamespace(run_dir=str(tmp_path), allow_changed_config=True, mode="train"),
        strategy=types.SimpleNamespace(exchange=lambda value: [value]),
        checkpoints=Checkpoints(tmp_path / "checkpoints", state, keep=None, about=CONFIG),
        state=state,
    )
    hashed, sha256, done = [], manifests.sha256, -1
    for step in range(1, 5):
        writer.save(step, {}, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(manifests, "sha256", lambda path: hashed.append(os.path.basename(path)) or sha256(path))
            found = [each.step for each in evaluator.restored(session, newer_than=done)]
        assert found == [step]
        done = step
    parts = ("data-00000-of-00001", "index")
    assert hashed == [f"ckpt-{step}.{part}" for step in range(1, 5) for part in parts]
