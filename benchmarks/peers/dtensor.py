"""A decoder sharded over two logical CPUs of one process by TensorFlow's DTensor, as its guide has it: a peer.

https://www.tensorflow.org/guide/dtensor_overview. The same block as `transformer_lm`'s with layer norms, learned
positions and GELU; the embedding is not sharded, since DTensor looks up no table sharded by rows, and the update is
plain gradient descent, since a slot that is assigned and read in one function trains wrongly there (TensorFlow 2.21).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import tensorflow as tf
from tensorflow.experimental import dtensor


def decoder(mesh: dtensor.Mesh, shape: dict[str, int]):
    """Makes the model; returns its variables, and its loss as a function of tokens and labels."""
    width, heads, vocabulary = (shape[name] for name in ("width", "heads", "vocabulary"))
    context, layers = shape["context"], shape["layers"]

    def variable(sizes, sharded=None, ones=False):
        layout = dtensor.Layout(
            [("model" if axis == sharded else dtensor.UNSHARDED) for axis in range(len(sizes))], mesh
        )
        value = tf.ones(sizes) if ones else tf.random.stateless_normal(sizes, [0, sum(sizes)], stddev=0.02)
        whole = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, len(sizes)))
        return dtensor.DVariable(dtensor.relayout(whole, layout))

    def norm(x, gain):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * gain

    embedding, positions, last = variable([vocabulary, width]), variable([context, width]), variable([width], ones=True)
    blocks = [
        {
            "norm_1": variable([width], ones=True),
            "norm_2": variable([width], ones=True),
            "qkv": [variable([width, heads, width // heads], 1) for _ in range(3)],
            "join": variable([heads, width // heads, width], 0),
            "up": variable([width, 4 * width], 1),
            "down": variable([4 * width, width], 0),
        }
        for _ in range(layers)
    ]
    variables = tf.nest.flatten([embedding, positions, last, blocks])
    mask = dtensor.copy_to_mesh(
        (1.0 - tf.linalg.band_part(tf.ones([context, context]), -1, 0)) * -1e9, dtensor.Layout.replicated(mesh, 2)
    )

    def loss(tokens, labels):
        x = tf.gather(embedding, tokens) + positions
        for block in blocks:
            y = norm(x, block["norm_1"])
            q, k, v = (tf.einsum("btw,whd->bhtd", y, w) for w in block["qkv"])
            scores = tf.einsum("bhtd,bhsd->bhts", q, k) * (width // heads) ** -0.5 + mask
            y = tf.einsum("bhts,bhsd->bhtd", tf.nn.softmax(scores), v)
            x += tf.einsum("bhtd,hdw->btw", y, block["join"])
            y = tf.nn.gelu(tf.einsum("btw,wu->btu", norm(x, block["norm_2"]), block["up"]), approximate=True)
            x += tf.einsum("btu,uw->btw", y, block["down"])
        logits = tf.einsum("btw,vw->btv", norm(x, last), embedding)
        chosen = tf.reduce_sum(tf.one_hot(labels, vocabulary) * tf.nn.log_softmax(logits), -1)
        return -tf.reduce_mean(chosen)

    return variables, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result_json", required=True)
    args = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    variables, loss = decoder(mesh, args.shape)

    @tf.function
    def step(tokens, labels):
        with tf.GradientTape() as tape:
            value = loss(tokens, labels)
        for v, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            v.assign_sub(1e-3 * tf.convert_to_tensor(gradient))
        return value

    windows = tf.random.stateless_uniform(
        [args.batch, args.shape["context"] + 1], [0, 0], 0, args.shape["vocabulary"], tf.int32
    )
    layout = dtensor.Layout.replicated(mesh, 2)
    inputs = [dtensor.copy_to_mesh(part, layout) for part in (windows[:, :-1], windows[:, 1:])]
    for _ in range(5):
        step(*inputs)
    began = time.perf_counter()
    for _ in range(args.steps):
        value = step(*inputs)
    value.numpy()
    rate = args.steps / (time.perf_counter() - began)
    Path(args.result_json).write_text(json.dumps({"steps_per_sec": rate}), encoding="utf-8")


if __name__ == "__main__":
    main()
