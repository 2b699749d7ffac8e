"""A run that is resumed with another batch size where an epoch ends: what counts epochs goes on."""

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
