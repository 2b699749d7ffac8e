"""--freeze: when weights train, and that a run resumes to the same bits; on one device and in several processes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.launch.errors import UsageError
from tests.distributed.jobs import start
from tests.launch.conftest import MLP
from tests.runs import manifests, result, tensors

_ = start  # the fixture
ASKED = (*MLP, "--mode=train", "--progress=off", "--global_batch_size=128", "--freeze=dense/:1", "--freeze=bias:0.5")
FREED = 12  # an epoch, at which the first layer's weights are; biases at 6


def weights(run_dir) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors(run_dir).items() if name.startswith("trainer/model/")}


def test_a_run_resumes_to_the_same_bits_before_and_as_weights_are_freed(inside, tmp_path):
    inside(*ASKED, "--train_steps=20", f"--run_dir={tmp_path}/whole").ok()
    for steps in (FREED - 3, FREED, 20):
        inside(*ASKED, f"--train_steps={steps}", f"--run_dir={tmp_path}/parts").ok()
    whole, parts = (tensors(tmp_path / name) for name in ("whole", "parts"))
    assert [name for name in whole if whole[name].tobytes() != parts[name].tobytes()] == []
    states = [manifests(tmp_path / name)[-1]["host_state"]["state"] for name in ("whole", "parts")]
    assert states[0] == states[1]


def test_a_run_goes_on_with_all_weights_where_that_is_asked(inside, tmp_path):
    """The slots are there, and begin where the weights do."""
    asked = (*MLP, "--mode=train", "--progress=off", f"--run_dir={tmp_path}")
    inside(*asked, "--freeze=dense/", "--train_steps=10").ok()
    before = weights(tmp_path)
    refused = inside(*asked, "--train_steps=11")
    assert "freeze: ['dense/'] -> []" in refused.mistake
    inside(*asked, "--train_steps=11", "--allow_changed_config").ok()
    moved = [np.abs(value - before[name]) for name, value in weights(tmp_path).items() if "kernel" in name]
    assert all(np.median(each[each > 0]) < 1.1e-3 for each in moved)  # the rate, as in a first update


class Backbone(tf.keras.layers.Layer):
    """A layer in a layer, as KerasHub's are."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.inner = tf.keras.layers.Dense(3, name="dense")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def lora():
    """A compiled model, of which what LoRA adds trains, and biases."""
    model = tf.keras.Sequential([tf.keras.Input([4]), Backbone()])
    model.layers[0].inner.enable_lora(rank=2)
    model.compile("adam", "mse")
    return model


def moved_variables(before, after):
    """The names of the variables whose values differ."""
    return {path.split("/")[-1] for path, value in after.items() if not np.array_equal(value, before[path])}


def test_lora_trains_what_it_adds_of_a_function_and_of_a_model_and_a_copy_of_it_is_one_line():
    x, y = np.ones([16, 4], np.float32), np.zeros([16, 3], np.float32)
    run = crankshaft.fit(lora, x, y, epochs=2, verbose=0, seed=1)
    once = crankshaft.fit(lora, x, y, epochs=1, verbose=0, seed=1)
    before, after = ({v.path: v.numpy() for v in each.model.variables} for each in (once, run))
    assert moved_variables(before, after) == {"bias", "lora_kernel_a", "lora_kernel_b"}
    model = lora()
    before = {v.path: v.numpy() for v in model.variables}
    crankshaft.fit(model, x, y, epochs=2, verbose=0)
    assert moved_variables(before, {v.path: v.numpy() for v in model.variables}) == {
        "bias",
        "lora_kernel_a",
        "lora_kernel_b",
    }
    with pytest.raises(UsageError, match=r"dense has 4 variables, and its copy has 2, as after enable_lora"):
        crankshaft.fit(lora(), x, y, verbose=0, strategy="mirrored", num_virtual_devices=1)


def test_mistakes_that_only_the_model_shows_are_one_line(inside):
    assert "freeze=nowhere matches the path of none of the 4 weights" in inside(*MLP, "--freeze=nowhere").mistake
    assert "nothing is left to train" in inside(*MLP, "--freeze=kernel", "--freeze=bias:2").mistake
    drifting = ("--strategy=mirrored", "--num_virtual_devices=2", "--sync_every_steps=16")
    line = inside(*MLP, *drifting, "--freeze=bias:1", "--eval_every_steps=0").mistake
    assert "freeze=bias:1 ends at step 23, between two syncs (sync_every_steps=16)" in line


def test_an_open_run_frees_weights_within_a_call_on_data_that_is_handed_in():
    x = np.random.default_rng(0).normal(size=(64, 8, 8)).astype(np.float32)
    y = np.arange(64) % 10
    asked = {"model": "mlp", "model_arg": {"hidden_units": [4]}, "freeze": ["dense/:1"], "jit": "off"}
    with crankshaft.open_run(data=((x, y), None, 10), **asked, progress="off", global_batch_size=16) as run:
        first = run.model.layers[1].kernel
        before = first.numpy()
        run.train(data=(x, y), steps=4)
        assert np.array_equal(first.numpy(), before)
        run.train(data=(x, y), steps=1)
        assert 0 < np.abs(first.numpy() - before).max() < 1.1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker", "parameter_server"])
def test_weights_are_freed_on_all_processes_where_the_step_is_and_after_a_resume(inside, start, tmp_path, strategy):
    """To the same bits; with servers, where the order of updates is random, frozen weights stay theirs."""

    def trained(name: str, steps: int) -> dict[str, np.ndarray]:
        flags = (*ASKED, f"--train_steps={steps}", f"--strategy={strategy}")
        if strategy == "mirrored":
            inside(*flags, "--num_virtual_devices=2", f"--run_dir={tmp_path}/{name}").ok()
        else:
            servers = 2 if strategy == "parameter_server" else 0
            start(name, *flags, local=("--workers=2", f"--ps={servers}"), script=()).ok()
        return tensors(tmp_path / name)

    begun, held, parts = (trained("parts", steps) for steps in (1, 9, 20))
    (kernel,) = (name for name in begun if name.startswith("trainer/model/") and "2/_kernel" in name)
    assert begun[kernel].tobytes() == held[kernel].tobytes()
    assert np.abs(parts[kernel] - held[kernel]).max() > 1e-4
    assert result(tmp_path / "parts")["step"] == 20
    if strategy != "parameter_server":
        whole = trained("whole", 20)
        assert [name for name in whole if whole[name].tobytes() != parts[name].tobytes()] == []
        inside(*ASKED, "--train_steps=20", f"--run_dir={tmp_path}/one").ok()
        for name, value in weights(tmp_path / "one").items():
            np.testing.assert_allclose(whole[name], value, atol=2e-5, err_msg=name)
