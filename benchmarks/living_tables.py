"""Tables whose ids come and go: AUC by day, memory and steps per second, with and without eviction; sweeps and moves.

Each day 500 new items come and the oldest leave; 2,000 are alive. Three tables train in turn on each day's clicks: one
that is soon full, the same with `evict_after`, and one with room for all ids. Then the rows of a large table are freed,
and the ids of another one, of width 32, move from two shards to three. Run it from the repository: `python -m
benchmarks.living_tables`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft import Embedding
from crankshaft.engine.machine import environment
from crankshaft.engine.metrics.means import auc
from crankshaft.parts.tables import rehash

from .markdown import spread, table

NEW_ITEMS, DAYS_ALIVE, BATCH, STEPS, TURN_STEPS = 500, 4, 64, 250, 25
TABLES = {
    "4,096 rows": {"rows": 4096},
    "4,096 rows, evict_after=500": {"rows": 4096, "evict_after": 500},
    "32,768 rows": {"rows": 32768},
}


class Clicks(crankshaft.Trainer):
    """A dense network on an item's row, whose first number counts by itself, too."""

    table: dict

    def build_model(self):
        self.items = Embedding("items", admit_after=1, **{"width": 9, **self.table})
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Input([self.items.width]), layers.Dense(16, "relu"), layers.Dense(1)])

    def forward(self, features, training):
        rows = self.items(features, training=training)
        return self.model(rows, training=training)[:, 0] + rows[:, 0]

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.nn.sigmoid_cross_entropy_with_logits(batch[1], outputs))

    def metrics(self, outputs, batch):
        return {"auc": auc(batch[1], outputs)}


def open_run(example: tuple, run_dir: str | None = None, **arguments) -> crankshaft.Run:
    """Opens a run of `Clicks` with a table."""
    flags = {"mode": "train", "global_batch_size": BATCH, "optimizer": "adagrad", "learning_rate": 0.3}
    trainer = type("Clicks", (Clicks,), {"table": arguments})
    return crankshaft.open_run(trainer, data=(example, None), run_dir=run_dir, **flags, jit="off", progress="off")


def train_in_turn(days: int) -> None:
    """Prints each table's AUC by day, on fresh clicks, the process's memory, and then steps per second."""
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 1.5, (days + DAYS_ALIVE) * NEW_ITEMS)
    ids = rng.integers(2**40, 2**62, len(effects))

    def clicks(day: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        items = NEW_ITEMS * day + rng.integers(0, NEW_ITEMS * DAYS_ALIVE, count)
        return ids[items], np.float32(rng.random(count) < 1 / (1 + np.exp(-effects[items])))

    rates: dict[str, list[float]] = {name: [] for name in TABLES}
    with contextlib.ExitStack() as stack:
        runs = {name: stack.enter_context(open_run(clicks(0, BATCH), **how)) for name, how in TABLES.items()}
        print(f"| day | {' | '.join(f'AUC of {name}' for name in TABLES)} | MB |\n|---:|---:|---:|---:|---:|")
        for day in range(days):
            fresh = clicks(day, 8000)
            for turn in range(STEPS // TURN_STEPS):
                new = clicks(day, TURN_STEPS * BATCH)
                for name in sorted(runs, reverse=bool(turn % 2)):
                    before = time.perf_counter()
                    float(runs[name].train(epochs=1, data=new)["loss"])
                    rates[name].append(TURN_STEPS / (time.perf_counter() - before))
            scores = [f"{runs[name].evaluate(fresh)['auc']:.3f}" for name in runs]
            print(f"| {day + 1} | {' | '.join(scores)} | {environment.rss_mb():,.0f} |", flush=True)
    rates = {name: np.array(values[STEPS // TURN_STEPS :]) for name, values in rates.items()}  # the first day compiles
    rows = []
    for name, values in rates.items():
        ratios = values / rates["32,768 rows"]
        medians = np.median(rng.choice(ratios, [1000, len(ratios)]), 1)  # bootstrap
        low, high = np.quantile(medians, [0.025, 0.975])
        rows.append([name, spread(values.tolist()), f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"])
    print(f"\n{table(['table', 'steps/s: median (least–most)', 'against 32,768 rows (95 %)'], rows)}")


def sweep(rows: int) -> None:
    """Prints how long it takes to free all rows of a table whose rows are all assigned, and their optimizer state."""
    with open_run((np.arange(BATCH), np.zeros(BATCH, np.float32)), rows=rows, evict_after=4) as run:
        run.train(steps=1)
        (assigned,) = run.trainer.items.admissions
        assigned.keys.assign(tf.reshape(tf.range(tf.size(assigned.keys), dtype=tf.int64), assigned.keys.shape))
        assigned.stamps.assign(tf.zeros_like(assigned.stamps))
        before, freed = time.perf_counter(), 0
        for shard, some in run.trainer.items.free_rows(10):
            run.trainer.optimizer.reset_rows(shard, some)
            freed += len(some)
        seconds = time.perf_counter() - before
        print(f"\n{freed:,} rows freed in {seconds:.1f} s, {freed / seconds:,.0f} per second")


def move(rows: int) -> None:
    """Prints how long ids and their optimizer state take from a checkpoint with two shards to a table with three."""
    example, capacity = (np.arange(BATCH), np.zeros(BATCH, np.float32)), rows * 5 // 4
    ids = np.unique(np.random.default_rng(0).integers(2**62, size=rows))[: rows // rehash.BUCKET * rehash.BUCKET]
    former = {"keys": [ids.reshape([-1, rehash.BUCKET])], "tally": [np.zeros(3, np.int64)]}
    with tempfile.TemporaryDirectory() as folder:
        with open_run(example, folder, rows=capacity, width=32, num_shards=2) as run:
            values = rehash.rehash(former, capacity, 2).values
            for assigned, value in zip(run.trainer.items.admissions, values, strict=True):
                assigned.keys.assign(value["keys"])
            before = run.trainer.items(ids[::1000], training=False).numpy()
            run.train(steps=1)
            run.save()
        with open_run(example, folder, rows=capacity, width=32, num_shards=3) as run:
            began = time.perf_counter()
            run.restore("latest")
            seconds = time.perf_counter() - began
            np.testing.assert_array_equal(run.trainer.items(ids[::1000], training=False), before)
    print(f"\n{len(ids):,} ids moved in {seconds:.1f} s, {len(ids) / seconds:,.0f} per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=30, help="of clicks (%(default)s)")
    parser.add_argument("--rows", type=int, default=10**7, help="that a sweep frees, and that move (%(default)s)")
    arguments = parser.parse_args()
    train_in_turn(arguments.days)
    sweep(arguments.rows)
    move(arguments.rows)


if __name__ == "__main__":
    main()
