"""Updates of a layer's Embedding by adam: milliseconds per step and memory if all of its rows move, or those in use.

Each case has a process of its own: a Keras Embedding, all of whose rows move; the same by the rows in use alone, as in
runs begun before; and `crankshaft.Embedding`, a table. Run it from the repository: `python -m benchmarks.embedding_rows
[--rows=100000,1000000]`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from .markdown import number, spread, table

KINDS = ("all rows", "rows in use", "crankshaft.Embedding")
BATCH, IDS, WIDTH = 128, 20, 32


def measure(kind: str, rows: int, calls: int, steps: int) -> dict:
    """Trains in this process: milliseconds per step of each call, and MB that it took beside TensorFlow, at most."""
    import numpy as np
    import tensorflow as tf

    import crankshaft
    from crankshaft.engine.machine import environment

    class Model(crankshaft.Trainer):
        def build_model(self):
            layers = tf.keras.layers
            if kind != KINDS[2]:
                self.table = layers.Embedding(rows, WIDTH)
                self.table.build()
            else:
                self.table = crankshaft.Embedding("table", rows, WIDTH)
            head = [layers.Input([IDS, WIDTH]), layers.GlobalAveragePooling1D(), layers.Dense(1)]
            return tf.keras.Sequential(head)

        @property
        def trainable_variables(self):
            own = self.table.trainable_variables if kind != KINDS[2] else []
            return [*super().trainable_variables, *own]

        def forward(self, features, training):
            return self.model(self.table(features))[:, 0]

        def loss(self, outputs, batch):
            return crankshaft.mean(tf.square(outputs - batch[1]))

    rng = np.random.default_rng(0)
    data = rng.integers(0, rows, [64 * BATCH, IDS]), rng.normal(size=64 * BATCH).astype(np.float32)
    before, times = environment.rss_mb(), []
    flags = {"optimizer": "adam", "global_batch_size": BATCH, "jit": "off", "progress": "off"}
    with crankshaft.open_run(Model, data=(data, None), **flags) as run:
        run.trainer.optimizer.moves_all_rows = kind == KINDS[0]
        run.train(steps=2 * steps)
        for _ in range(calls):
            began = time.perf_counter()
            float(run.train(steps=steps)["loss"])
            times.append(1000 * (time.perf_counter() - began) / steps)
    return {"times": times, "mb": environment.peak_rss_mb() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="100000,1000000", help="rows of a table, with a comma between several")
    parser.add_argument("--calls", type=int, default=10, help="calls that are timed")
    parser.add_argument("--steps", type=int, default=20, help="steps per call")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(measure(args.kind, int(args.rows), args.calls, args.steps)))
        return
    lines = []
    for rows in map(int, args.rows.split(",")):
        for kind in KINDS:
            how = [f"--rows={rows}", f"--calls={args.calls}", f"--steps={args.steps}", f"--kind={kind}"]
            command = [sys.executable, "-m", "benchmarks.embedding_rows", *how]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            lines.append([f"{rows:,}", kind, spread(found["times"]), number(found["mb"])])
    print(table(["rows", "what moves", "ms per step: median (least–most)", "MB at most"], lines, names=2))


if __name__ == "__main__":
    main()
