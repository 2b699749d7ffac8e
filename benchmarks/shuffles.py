"""How random each order is, of a sorted file: `python -m benchmarks.shuffles` prints a table.

The file has ten classes, one after the other. An epoch of it is taken in each order, in batches of 64: how far apart in
the file two neighbours of the epoch stand, at the median, and how the share of a class in a batch varies. A shuffle of
all would give 29 % of the file and a standard deviation of sqrt(0.1 * 0.9 / 64) = 0.0375.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

BATCH, CLASSES, CHUNK, SEED = 64, 10, 1024, 1
WINDOWS = (16, 64, 256)
BUFFER = 10_000


def epoch(order) -> np.ndarray:
    """The first epoch's examples, in their order."""
    import tensorflow as tf

    blocks, step = [], 0
    while step < order.whole_steps:
        block, _, length = order.block_at(step)
        blocks.append(order.examples(tf.constant(block, tf.int64)).numpy()[:length].ravel())
        step += length
    return np.concatenate(blocks)


def row(name: str, examples: np.ndarray, count: int) -> str:
    distance = np.median(np.abs(np.diff(examples))) / count
    batches = examples[: len(examples) // BATCH * BATCH].reshape(-1, BATCH)
    classes = batches * CLASSES // count
    shares = np.stack([(classes == each).mean(1) for each in range(CLASSES)], 1)
    return f"| {name} | {distance:.1%} | {shares.std():.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    count = parser.parse_args().examples
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from crankshaft.engine.data.order import ChunkedOrder, Order

    print("| order | distance of neighbours | standard deviation of a class's share of a batch |")
    print("|---|---:|---:|")
    print(row("indexed", epoch(Order(count, BATCH, 1000, SEED)), count))
    for window in WINDOWS:
        order = ChunkedOrder(count, BATCH, 1000, SEED, chunk_examples=CHUNK, window_chunks=window)
        print(row(f"by chunks of {CHUNK:,}, `--shuffle_window={window}`", epoch(order), count))
    shuffled = tf.data.Dataset.range(count).shuffle(BUFFER, SEED).batch(BATCH)
    print(row(f"`shuffle({BUFFER:,})` of one file", np.concatenate([*shuffled.as_numpy_iterator()]), count))


if __name__ == "__main__":
    main()
