"""How much faster buckets make speech of varying length: `python -m benchmarks.lengths`.

Recordings of 50 to 400 frames of 40 numbers are trained on by a bidirectional GRU with CTC, padded to the longest of
each batch, and in buckets (`--bucket_by`), with one bound on the memory of a batch. Times whole epochs of both in turn;
prints examples per second, and their ratio.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import tensorflow as tf

from crankshaft import Source, Spec, Trainer, mean, open_run

FRAMES, SYMBOLS, EXAMPLES, BATCH = 40, 28, 512, 16
BUCKETS = "0:75,100,125,150,200,250,300,400:6400"  # 6,400 frames are 16 examples of 400


class Speech(Source):
    """Recordings, made from their number."""

    element_spec = (Spec((None, FRAMES), "float32"), Spec((None,), "int32"))

    def __init__(self, skewed: bool):
        rng = np.random.default_rng(1)
        share = rng.beta(1.5, 4.0, EXAMPLES) if skewed else rng.random(EXAMPLES)
        self.sizes = (50 + 350 * share).astype(int)

    def __len__(self) -> int:
        return EXAMPLES

    def read(self, indices: np.ndarray):
        rngs = [np.random.default_rng(index) for index in indices.tolist()]
        sizes = self.sizes[indices]
        heard = [rng.normal(size=(size, FRAMES)).astype("float32") for rng, size in zip(rngs, sizes, strict=True)]
        said = [rng.integers(0, SYMBOLS, size // 8).astype("int32") for rng, size in zip(rngs, sizes, strict=True)]
        return heard, said

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self.sizes[indices], self.sizes[indices] // 8], 1)


class Recognizer(Trainer):
    """A bidirectional GRU with CTC."""

    def build_model(self):
        read = tf.keras.layers.Bidirectional(tf.keras.layers.GRU(64, return_sequences=True))
        return tf.keras.Sequential([read, tf.keras.layers.Dense(SYMBOLS + 1)])

    def loss(self, outputs, batch):
        heard, said = batch
        return mean(
            tf.nn.ctc_loss(
                said.values, outputs, said.lengths, heard.lengths, logits_time_major=False, blank_index=SYMBOLS
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="epochs of each that are timed")
    parser.add_argument("--skewed", action="store_true", help="most lengths are short, instead of uniform")
    options = parser.parse_args()
    settings = {
        "padded": {"global_batch_size": BATCH},
        "bucketed": {"global_batch_size": 64, "bucket_by": BUCKETS},
    }
    rates: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(options.turns):
        for name, flags in settings.items():
            data = Speech(options.skewed)
            with open_run(Recognizer, data=(data, None), train_epochs=3, jit="off", **flags) as run:
                run.train(epochs=1)  # traces
                before = time.perf_counter()
                means = run.train(epochs=1)
                float(means["loss"])
                rates[name].append(EXAMPLES / (time.perf_counter() - before))
    for name, each in rates.items():
        print(f"{name:10} {np.median(each):8.1f} examples/s ({', '.join(f'{rate:.1f}' for rate in each)})")
    pairs = np.array(rates["bucketed"]) / np.array(rates["padded"])
    print(f"bucketed is {np.median(pairs):.2f} times as fast ({pairs.min():.2f} to {pairs.max():.2f})")


if __name__ == "__main__":
    main()
