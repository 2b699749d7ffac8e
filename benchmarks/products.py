"""The three matrix products of a dense layer's step, each in the orders it can be written in, with and without XLA.

Run as a script: `python -m benchmarks.products`. Prints milliseconds, medians of rounds in turn, for a batch of
64 and a kernel of 2048x2048: the reason for `engine.layers.Dense`.
"""

import statistics
import time

import tensorflow as tf

from crankshaft.engine.machine import allocator

BATCH, WIDTH, ROUNDS, CALLS = 64, 2048, 7, 10

PRODUCTS = {
    "outputs: x W": lambda x, w, dy: tf.matmul(x, w),
    "outputs: x W, batched": lambda x, w, dy: tf.matmul(x[tf.newaxis], w[tf.newaxis])[0],
    "inputs' gradient: dy W^T": lambda x, w, dy: tf.matmul(dy, w, transpose_b=True),
    "inputs' gradient: dy W^T, batched": lambda x, w, dy: tf.matmul(dy[tf.newaxis], w[tf.newaxis], transpose_b=True)[0],
    "inputs' gradient: (W dy^T)^T": lambda x, w, dy: tf.transpose(tf.matmul(w, tf.transpose(dy))),
    "inputs' gradient: (W dy^T)^T, batched": lambda x, w, dy: tf.transpose(
        tf.matmul(w[tf.newaxis], dy[tf.newaxis], transpose_b=True)[0]
    ),
    "kernel's gradient: x^T dy": lambda x, w, dy: tf.matmul(x, dy, transpose_a=True),
    "kernel's gradient: (dy^T x)^T": lambda x, w, dy: tf.transpose(tf.matmul(dy, x, transpose_a=True)),
}


def main() -> None:
    allocator.keep_freed_memory()
    operands = [tf.random.normal(shape) for shape in ([BATCH, WIDTH], [WIDTH, WIDTH], [BATCH, WIDTH])]
    compiled = {(name, jit): tf.function(f, jit_compile=jit) for name, f in PRODUCTS.items() for jit in (None, True)}
    seconds = {key: [] for key in compiled}
    for function in compiled.values():
        function(*operands)
    for _ in range(ROUNDS):
        for key, function in compiled.items():
            before = time.perf_counter()
            for _ in range(CALLS):
                result = function(*operands)
            result.numpy()
            seconds[key].append((time.perf_counter() - before) / CALLS)
    print("| product | ms | ms with XLA |\n|---|---:|---:|")
    for name in PRODUCTS:
        plain, xla = (1e3 * statistics.median(seconds[name, jit]) for jit in (None, True))
        print(f"| {name} | {plain:.2f} | {xla:.2f} |")


if __name__ == "__main__":
    main()
