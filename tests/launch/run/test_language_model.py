"""A run of the language model that comes with Crankshaft: it generates, also on a mesh, and is served without us."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine import generation
from tests.logical_cpus import make_four
from tests.waiting import PATIENCE

CONTEXT, SEPARATOR, PROMPT = 32, 256, "The Congress shall"
# Prints what a SavedModel says, in a process that has TensorFlow alone.
SERVE = """
import json, sys
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1]).signatures
row = json.load(sys.stdin)
logits = served["next_token_logits"](tokens=tf.constant([row, row]))["logits"]
def follow(temperature, seed):
    how = {"num_tokens": 50, "temperature": temperature, "top_k": 9, "seed": tf.constant(seed, tf.int64)}
    return served["generate"](tokens=tf.constant([row]), **{k: tf.constant(v) for k, v in how.items()})["tokens"]
assert "crankshaft" not in sys.modules
print(json.dumps([logits.numpy().tolist(), *(follow(*of).numpy()[0].tolist() for of in ((0.0, 0), (0.8, 5)))]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the bundled text: what `crankshaft.run` returned."""
    make_four()
    return crankshaft.run(
        model="transformer_lm",
        model_arg={"layers": 2, "width": 32, "heads": 4},
        input="text",
        input_arg={"context": CONTEXT},
        run_dir=tmp_path_factory.mktemp("language") / "run",
        mode="train",
        train_steps=150,
        global_batch_size=16,
        learning_rate=0.01,
        jit="off",
        progress="off",
    )


@pytest.fixture(scope="module")
def whole(trained):
    """The model, compiled once for rows of any length."""
    return tf.function(trained.model, input_signature=[tf.TensorSpec([1, None], tf.int32)])


def without_cache(model, row, count, temperature):
    """The tokens that follow, each told by all that the model looks at then, read again."""
    row, begin = list(row), max(0, len(row) - CONTEXT)
    for _ in range(count):
        if len(row) - begin > CONTEXT:
            begin = len(row) - CONTEXT // 2
        seed = tf.constant([0, len(row)], tf.int64)
        logits = model(np.array([row[begin:]]))[:, -1]
        row.append(int(generation.choose(logits, tf.constant(temperature), tf.constant(0), seed)[0]))
    return row[-count:]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_tokens_are_those_without_a_cache(trained, whole, temperature):
    for row in ([SEPARATOR], [SEPARATOR, *PROMPT.encode()], [*range(97, 117)] * 2):
        expected = without_cache(whole, row, 60, temperature)
        assert trained.generate(row, tokens=60, temperature=temperature, top_k=0) == expected
        assert temperature == 0 or len(set(expected)) > 10


def test_an_exported_model_is_served_by_tensorflow_alone(trained, inside):
    outcome = inside("--mode=export", f"--run_dir={trained.run_dir}").ok()
    assert "SavedModel of step 150" in outcome.out
    folder = f"{trained.run_dir}/export/150"
    row = [SEPARATOR, *PROMPT.encode()]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, folder],
        input=json.dumps(row),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logits, greedy, sampled = json.loads(done.stdout)
    expected = trained.model(np.array([row, row]))[:, -1]
    np.testing.assert_allclose(logits, expected, atol=1e-5)  # float32's rounding of logits up to 10
    assert greedy == row + trained.generate(row, tokens=50, temperature=0)
    assert sampled == row + trained.generate(row, tokens=50, temperature=0.8, top_k=9, seed=5)
    with open(f"{folder}/assets.extra/data.json", encoding="utf-8") as file:
        assert json.load(file)["tokens"] == {"kind": "bytes"}
    with open(f"{folder}/README.md", encoding="utf-8") as file:
        assert "Signature `generate`: tokens [any, any] int32, num_tokens [] int32," in file.read()


def test_on_a_mesh_it_generates_what_one_device_does(trained, inside):
    flags = ("--mode=generate", f"--run_dir={trained.run_dir}", f"--prompt={PROMPT}", "--sampling=tokens=50")
    flags += ("--strategy=mirrored", "--num_virtual_devices=4", "--mesh=data:2,model:2", "--sampling=temperature=0.8")
    together = inside(*flags).ok()
    assert together.out == f"{PROMPT}{trained.generate(PROMPT, tokens=50, temperature=0.8)}\n"
    assert "; 4 replica" in together.err


@pytest.mark.slow
def test_workers_that_hold_a_model_together_generate_what_one_device_does(trained, inside, crank):
    run = ("--mode=generate", f"--run_dir={trained.run_dir}", f"--prompt={PROMPT}", "--sampling=tokens=50")
    alone = inside(*run).ok()
    sharded = crank("--workers=2", "--", *run, "--strategy=multi_worker", "--mesh=model:2", command="local").ok()
    lines = [line.removeprefix("[worker 0] ") for line in sharded.out.splitlines() if line.startswith("[worker 0] ")]
    assert lines == alone.out.splitlines()
    assert "transformer_lm: step 150, checkpoints/ckpt-150; 2 replicas" in sharded.err
