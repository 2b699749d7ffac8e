"""Runs whose replicas share updates out: resumed to the bit, and by one device; in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import mean
from crankshaft.models.mlp import Model as Mlp
from tests.runs import tensors

COMMON = ("--model_arg=hidden_units=48,32", "--input=digits", "--mode=train", "--jit=off", "--progress=plain")
RUN = ("--model=mlp", *COMMON, "--optimizer=adamw", "--clip_norm=1", "--ema_decay=0.9", "--checkpoint_every_steps=10")
MIRRORED = ("--strategy=mirrored", "--num_virtual_devices=2")


def close(run_dir, other_dir):
    """Everything that a checkpoint holds is whole, and the same within Adam's rounding, which divides by small sums."""
    found, expected = tensors(run_dir), tensors(other_dir)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_by_one_device(inside, tmp_path):
    sharded = (*RUN, *MIRRORED, "--shard_optimizer", "--check_sync_every_steps=5")
    inside(*RUN, "--train_steps=20", f"--run_dir={tmp_path}/one").ok()
    inside(*sharded, "--train_steps=20", f"--run_dir={tmp_path}/whole").ok()
    for name in ("again", "alone"):
        inside(*sharded, "--train_steps=10", f"--run_dir={tmp_path}/{name}").ok()
    inside(*sharded, "--train_steps=20", f"--run_dir={tmp_path}/again").ok()
    inside(*RUN, "--train_steps=20", f"--run_dir={tmp_path}/alone").ok()
    whole, again = tensors(tmp_path / "whole"), tensors(tmp_path / "again")
    assert [name for name in whole if whole[name].tobytes() != again[name].tobytes()] == []
    close(tmp_path / "whole", tmp_path / "one")
    close(tmp_path / "alone", tmp_path / "one")


class Steep(Mlp):
    """Whose first scaled gradients are more than float16 holds."""

    def loss(self, outputs, batch):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(batch[1], tf.int32), outputs)
        return mean(4096.0 * losses)


def test_the_same_steps_are_left_out(inside, tmp_path):
    """The scale is halved until nothing overflows: beside replicas that each update all."""
    flags = (*COMMON, *MIRRORED, "--precision=float16", "--optimizer=momentum", "--reduce_dtype=bfloat16")
    flags += ("--learning_rate=1e-6", "--train_steps=30")
    for name, more in (("plain", ()), ("sharded", ("--shard_optimizer",))):
        inside(*flags, *more, f"--run_dir={tmp_path}/{name}", trainer=Steep).ok()
    close(tmp_path / "sharded", tmp_path / "plain")
    updates = tensors(tmp_path / "plain")["trainer/optimizer/iterations/.ATTRIBUTES/VARIABLE_VALUE"]
    assert 0 < updates < 30
