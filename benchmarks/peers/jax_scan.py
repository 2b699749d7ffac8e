"""Training as one writes it in JAX: many steps in one jitted scan, data on the device. A peer that takes turns.

Parameters and Adam's state are donated, batches are gathered within the scan from arrays that live on the device, in an
order that is shuffled again each epoch. Needs JAX, optax and NumPy, no TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..peer import parse_arguments, take_turns
from ..workloads import BATCH_SIZE, WORKLOADS, Workload

OPTIMIZER = optax.adam(0.001, eps=1e-7)  # Keras's epsilon


def init(workload: Workload, seed: int) -> list:
    """(kernel, bias) of each layer: those of `benchmarks.keras_models`, and their initial distribution."""
    if workload.units:
        widths = [784, *workload.units, 10]
        shapes = list(itertools.pairwise(widths))
    else:
        shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (5 * 5 * 64, 64), (64, 10)]
    keys, sample = jax.random.split(jax.random.key(seed), len(shapes)), jax.nn.initializers.glorot_uniform()
    return [(sample(key, shape), jnp.zeros(shape[-1])) for key, shape in zip(keys, shapes, strict=True)]


def forward(params: list, x: jax.Array) -> jax.Array:
    """Logits of images [batch, 28, 28, 1]."""
    for index, (kernel, bias) in enumerate(params):
        if kernel.ndim == 4:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + bias)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        else:
            x = x.reshape(len(x), -1) @ kernel + bias
            x = jax.nn.relu(x) if index < len(params) - 1 else x
    return x


def loss_of(params: list, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


@functools.partial(jax.jit, donate_argnums=0, static_argnames="unroll")
def train(carry, data, indices, unroll: int = 1):
    """As many steps as `indices` [steps, batch] has rows. Returns ((parameters, optimizer's state), losses)."""

    def step(carry, chosen):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params, data[0][chosen], data[1][chosen])
        updates, state = OPTIMIZER.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    if unroll < len(indices):
        return jax.lax.scan(step, carry, indices, unroll=unroll)
    losses = []  # JAX leaves a scan of one step a loop, which XLA's convolutions are slow in
    for chosen in indices:
        carry, loss = step(carry, chosen)
        losses.append(loss)
    return carry, jnp.stack(losses)


def batches(examples: int) -> Iterator[np.ndarray]:
    """Indices of batches [batch] for ever, in another order each epoch."""
    generator = np.random.default_rng(0)
    while True:
        yield from generator.permutation(examples).astype(np.int32).reshape(-1, BATCH_SIZE)


def main() -> None:
    count = {"type": int, "default": 1}
    arguments = parse_arguments(__doc__, WORKLOADS, steps_per_call=count, unroll=count)
    splits = WORKLOADS[arguments.workload].load()
    data = jax.device_put(splits.train)
    params = init(WORKLOADS[arguments.workload], 0)
    carry = params, OPTIMIZER.init(params)
    order = batches(len(splits.train[1]))

    def run(steps: int) -> float:
        """Trains so many steps, made whole calls; steps a second, all of them done."""
        nonlocal carry
        calls = -(-steps // arguments.steps_per_call)
        before = time.perf_counter()
        for _ in range(calls):
            indices = np.stack(list(itertools.islice(order, arguments.steps_per_call)))
            carry, _ = train(carry, data, indices, unroll=arguments.unroll)
        jax.block_until_ready(carry)
        return calls * arguments.steps_per_call / (time.perf_counter() - before)

    quality = None
    if arguments.quality_steps:
        run(arguments.quality_steps)
        x, y = jax.device_put(splits.evaluation)
        logits = jax.jit(forward)(carry[0], x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        quality = {"loss": float(loss), "accuracy": float((logits.argmax(-1) == y).mean())}
    take_turns(run, quality=quality)


if __name__ == "__main__":
    main()
