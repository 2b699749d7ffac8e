"""A run that is resumed with another batch size: each example once an epoch, and what counts epochs goes on."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine import Trainer, mean
from crankshaft.engine.hooks import every_epoch, every_steps
from tests.runs import manifests, result, tensors

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


@pytest.mark.parametrize(("form", "devices"), [("arrays", TWO), ("dataset", ())])
def test_each_example_is_seen_once_an_epoch_and_epochs_end_where_they_do(inside, tmp_path, form, devices):
    """40 of 100 in batches of 10, then one of 8, up to the next multiple of 16, three of 16, and one of 4."""
    ends = []

    def ran(*flags):
        hook = every_epoch(lambda status, means: ends.append((status.step, status.epoch)))
        flags = (*RUN, "--optimizer=sgd", "--learning_rate=1", *devices, *flags, f"--run_dir={tmp_path}")
        return inside(*flags, trainer=Count, data=lambda: (FORMS[form](), (IDS[:8], IDS[:8])), hooks=[hook]).ok().out

    ran("--train_steps=4", "--global_batch_size=10")
    assert "origin" not in manifests(tmp_path)[-1]["about"]
    out = ran("--train_steps=6", "--global_batch_size=16")
    line = "batch size 16, which was 10: epoch 1 continues after 40 of 100 examples, with a first batch of 8"
    assert line in out.splitlines()
    out = ran("--train_epochs=1", "--global_batch_size=16")  # within the epoch, once more
    assert "resumed at step 6 of 9" in out
    assert "which was" not in out
    lost = np.round(-80 * crankshaft.load_model(str(tmp_path)).weights[0].numpy()[:, 0]).astype(int)
    assert collections.Counter(lost.tolist()) == {80 // 10: 40, 80 // 8: 8, 80 // 16: 48, 80 // 4: 4}
    assert "resumed at step 9 of 16" in ran("--train_epochs=2", "--global_batch_size=16")
    assert ends == [(9, 1), (16, 2)]
    assert result(tmp_path)["step"] == 16


def test_an_interruption_changes_no_bit_and_the_rate_goes_on_by_examples(inside, tmp_path):
    """After 7 of 20 steps of 20, two of which warm up: the rate falls on from where it is to where it ends."""
    rates: dict[int, float] = {}

    def note(status, means):
        rates[status.step] = float(status.state.trainer.optimizer.current_learning_rate())

    def ran(name, *flags, stop=0):
        def end(status, means):
            status.stop = "enough" if status.step == stop else status.stop

        flags = ("--learning_rate_schedule=cosine", "--learning_rate=1", "--warmup_steps=2", "--train_epochs=4", *flags)
        flags = (*RUN, *flags, f"--run_dir={tmp_path / name}")
        hooks = [every_steps(1, note), every_steps(1, end)]
        return inside(*flags, trainer=Count, data=lambda: ((IDS, IDS), None), hooks=hooks).ok().out

    for name in ("straight", "parts"):
        ran(name, "--global_batch_size=20", stop=7)
    out = ran("parts", "--global_batch_size=40", stop=9)
    assert "epoch 2 continues after 40 of 100 examples; the learning-rate schedule continues by examples\n" in out
    ran("parts", "--global_batch_size=40")
    ran("straight", "--global_batch_size=40")
    np.testing.assert_equal(tensors(tmp_path / "parts"), tensors(tmp_path / "straight"))
    last = 7 + 2 + 6
    assert result(tmp_path / "straight")["step"] == last
    found = [rates[step] for step in range(7, last + 1)]
    examples = np.array([140, 180, 200, 240, 280, 300, 340, 380, 400])
    progress = (examples // 20 - 2) / 18  # since the warm-up, in steps of 20 examples
    np.testing.assert_allclose(found, 0.5 * (1 + np.cos(np.pi * progress)), atol=1e-6)


def test_what_can_not_go_on_in_other_batches_is_one_line(inside, tmp_path):
    run = (*RUN, "--optimizer=sgd", "--train_steps=8", "--checkpoint_every_steps=4", "--global_batch_size=10")
    apart = (*TWO, "--sync_every_steps=4", f"--run_dir={tmp_path / 'apart'}")
    data = (IDS, IDS), None
    inside(*run, *apart, trainer=Count, data=lambda: data).ok()
    line = inside(*run, *apart, "--global_batch_size=40", trainer=Count, data=lambda: data).mistake
    assert line.startswith("global_batch_size=40: from step 8 on epochs would end between two syncs (sync_every_st")
    inside(*run, f"--run_dir={tmp_path / 'one'}", trainer=Count, data=lambda: data).ok()
    how = {"train_steps": 12, "global_batch_size": 20, "allow_changed_config": True, "jit": "off", "optimizer": "sgd"}
    with crankshaft.open_run(Count, data=data, run_dir=str(tmp_path / "one"), progress="off", **how) as opened:
        with pytest.raises(crankshaft.UsageError, match="ckpt-4 was written before batches of 20 began, at step 8"):
            opened.restore(4)
        opened.train(steps=2)
        assert opened.step == 10
