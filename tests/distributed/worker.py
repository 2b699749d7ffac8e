"""One worker of a test: notes the examples that it is given by each kind of feed, and what it computes of them.

Usage: worker.py FOLDER, with TF_CONFIG; writes FOLDER/found-INDEX.json. Examples are their own ids, from 1 on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
import types

import numpy as np
import tensorflow as tf

from crankshaft import Trainer, auc, mean
from crankshaft.engine import hooks, logging
from crankshaft.engine.build import prepare
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.data.source import Source, SourceSlice, Spec, Split
from crankshaft.engine.data.streamed import DatasetStream
from crankshaft.engine.errors import OutOfSyncError
from crankshaft.engine.hooks.bottlenecks import Stragglers
from crankshaft.engine.hooks.sync_check import SyncCheck
from crankshaft.engine.loop import Loop
from crankshaft.engine.mesh import collectives
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.options import RunContext, StepOptions
from crankshaft.engine.strategies import FeedOptions, StrategyOptions, WorkerTask
from crankshaft.launch.composition import devices
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.clusters import tf_config
from crankshaft.parts.tensorboard import TensorBoard
from crankshaft.parts.workers.multi_worker import MultiWorker
from tests.engine.trainers import stripes

EXAMPLES, BATCH, EPOCHS = 25, 6, 2
LINES = (9, 2, 14)  # of three files: uneven shares, also where files are divided
FILES = 7  # of a source
EVAL_EXAMPLES, EVAL_BATCH = 23, 5


class Silent(Trainer):
    """Trains nothing, and sums up what it is given."""

    def build(self):
        self.seen = tf.Variable(0, trainable=False)

    def train_step(self, batch):
        _, ids = batch
        return {"loss": mean(ids), "square": mean(ids * ids)}

    def eval_step(self, batch):
        _, ids = batch
        return {**self.train_step(batch), "auc": auc(ids % 2, ids % 7)}


def arrays(examples: int):
    ids = np.arange(1, examples + 1, dtype=np.int64)
    return ids.astype(np.float32)[:, None], ids


def from_files(folder: pathlib.Path) -> tf.data.Dataset:
    """Examples from the text files of a folder, an id a line."""
    return tf.data.TextLineDataset(sorted(map(str, folder.glob("ids-*")))).map(
        lambda line: (tf.strings.to_number([line], tf.float32), tf.strings.to_number(line, tf.int64))
    )


class InFiles(Source):
    """Examples of files, each a row of ids; `chunk_examples` of them are read at once."""

    element_spec = (Spec((1,), np.float32), Spec((), np.int64))

    def __init__(self, folder: pathlib.Path, chunk_examples: int = 1):
        self.chunk_examples = chunk_examples
        self._paths = sorted(folder.glob("part-*"))
        self._starts = np.cumsum([0, *(path.stat().st_size // 8 for path in self._paths)])

    def __len__(self):
        return int(self._starts[-1])

    def read(self, indices):
        files = np.searchsorted(self._starts, indices, side="right") - 1
        offsets = 8 * (indices - self._starts[files])
        ids = [np.fromfile(self._paths[f], np.int64, 1, offset=p)[0] for f, p in zip(files, offsets, strict=True)]
        return np.array(ids, np.float32)[:, None], np.array(ids)


def write_files(folder: pathlib.Path) -> None:
    """Writes the ids into files of sizes that differ."""
    ends = [EXAMPLES * each**2 // FILES**2 for each in range(FILES + 1)]
    for file, (first, stop) in enumerate(itertools.pairwise(ends)):
        np.arange(first + 1, stop + 1, dtype=np.int64).tofile(folder / f"part-{file}")


def sources(folder: pathlib.Path):
    """name -> (source, feed options)."""
    dataset = tf.data.Dataset.from_tensor_slices(arrays(EXAMPLES))
    files = from_files(folder)
    return {
        "resident": (arrays(EXAMPLES), FeedOptions()),
        "streamed": (arrays(EXAMPLES), FeedOptions(resident_bytes=0)),
        "dataset auto": (dataset, FeedOptions(auto_shard="AUTO")),
        "files auto": (files, FeedOptions(auto_shard="AUTO")),
        "files data": (files, FeedOptions(auto_shard="DATA")),
        "files file": (files, FeedOptions(auto_shard="FILE")),
        "source": (InFiles(folder), FeedOptions(resident_bytes=0)),
        "source by chunks": (InFiles(folder, 4), FeedOptions(resident_bytes=0, shuffle_window=2)),
    }


def split_of(data) -> Split:
    """The data as a run has it."""
    if isinstance(data, tf.data.Dataset):
        return DatasetStream(data)
    return data if isinstance(data, Source) else ArraySource(data)


def seen(strategy: MultiWorker, source) -> list[list[int]]:
    """The ids of this worker, step by step."""
    feed = strategy.feed(split_of(source), BATCH, seed=3)
    batches = []
    step = tf.function(
        lambda operands, offset: strategy.distribution.run(
            lambda *batch: feed.batch(*batch)[1], args=feed.next_operands(operands, offset)
        ),
        autograph=False,
    )
    for number in range(EPOCHS * feed.order.steps_per_epoch):
        operands, start, _ = feed.call_input(number, 1)
        ids = step(operands, tf.constant(start, tf.int64))
        local = strategy.distribution.experimental_local_results(ids)
        batches.append([int(i) for part in local for i in part.numpy()])
    return batches


def crossed(strategy: MultiWorker) -> dict:
    """What comes of summing and gathering values that are sent whole, that travel in pieces, and on the line."""
    most = collectives.GATHERED_BYTES // strategy.num_hosts // 4
    found = {}
    for size in (1, 1001, most, most + 1, 4 * most):
        parts = [np.random.default_rng(host).standard_normal(size, np.float32) for host in range(strategy.num_hosts)]

        def cross(mine):
            context = tf.distribute.get_replica_context()
            return collectives.all_reduce(context, mine + 0.0), collectives.all_gather(context, mine + 0.0)

        on_each = tf.function(lambda mine, cross=cross: strategy.distribution.run(cross, args=(mine,)), autograph=False)
        total, gathered = (each.numpy() for each in on_each(tf.constant(parts[strategy.host])))
        found[str(size)] = {
            "gathered": bool(np.array_equal(gathered, parts)),
            "error": float(np.max(np.abs(total - np.sum(parts, 0, np.float64)) / np.sum(np.abs(parts), 0))),
            "bits": hashlib.sha256(total.tobytes()).hexdigest(),
        }
    return found


def evaluated(strategy: MultiWorker, data) -> list[dict]:
    with strategy.scope():
        state = TrainState(prepare(Silent(), RunContext(example=arrays(1))))
        state.build()
    strategy.bind(state, None, strategy.feed(split_of(data), EVAL_BATCH, None))
    evaluations = [strategy.evaluate() for _ in range(2)]
    return [{**sums.values(), "auc": sums.means()["auc"]} for sums in evaluations]


def bound(strategy: MultiWorker, trainer: Trainer, seed: int = 0) -> TrainState:
    """The state of a trainer that is about to train on pictures."""
    with strategy.scope():
        example = tf.nest.map_structure(lambda array: np.zeros_like(array[:1]), stripes(254))
        state = TrainState(prepare(trainer, RunContext(StepOptions(seed=seed), 4, example=example)))
        state.build()
    strategy.bind(state, strategy.feed(split_of(stripes(254)), 12, seed))
    return state


def curve(strategy: MultiWorker, trainer: Trainer, steps: int) -> list[float]:
    """The loss of each step. By seed 1: by seed 0 rounding decides a tie of the CNN's pooling at step 17."""
    state = bound(strategy, trainer, seed=1)
    values = []
    while state.step < steps:
        total, count = strategy.run(strategy.training, 1).sums.read()["loss"]
        values.append(total / count)
    return values


class Centred(Trainer):
    """Learns from rows of ids, by a sparse gradient; sums over replicas in a layer of Keras's, and gathers over them
    in its loss."""

    def build_model(self):
        layers = tf.keras.layers
        rows = [tf.keras.Input([3], dtype="int32"), layers.Embedding(30, 4), layers.Flatten()]
        return tf.keras.Sequential([*rows, layers.BatchNormalization(synchronized=True), layers.Dense(1)])

    def loss(self, outputs, batch):
        everyones = tf.distribute.get_replica_context().all_gather(outputs[:, 0], axis=0)
        return mean((outputs[:, 0] + tf.reduce_mean(everyones) - batch[1]) ** 2)


def centred(strategy: MultiWorker) -> list[float]:
    """The weights after 50 steps on a dataset, several a call; the last batch of an epoch has one example."""
    ids = np.random.default_rng(0).integers(0, 30, (253, 3)).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids.sum(1).astype(np.float32) / 30))
    with strategy.scope():
        state = TrainState(prepare(Centred(), RunContext(example=(ids[:1], np.zeros(1, np.float32)))))
        state.build()
    strategy.bind(state, strategy.feed(split_of(dataset), 12, 0))
    while state.step < 50:
        strategy.run(strategy.training, 50 - state.step).sums.read()
    return [float(x) for variable in state.trainer.model.variables for x in np.ravel(variable.numpy())]


def agreement(strategy: MultiWorker) -> list:
    """Of ten calls, the last worker wants to stop from the fourth on: which steps each call took, and who knew what."""
    bound(strategy, Mlp((32,)))
    told = []
    for call in range(10):
        wish = "SIGTERM" if call >= 3 and strategy.host == strategy.num_hosts - 1 else None
        stop = strategy.agree_to_stop(wish)
        told.append([strategy.run(strategy.training, 20).steps, stop and str(stop)])
    return told


class Slowed(Mlp):
    """Takes 100 ms more a step on one worker: more than a busy machine takes of the others' steps."""

    def __init__(self, slow: bool):
        super().__init__((32,))
        self.slow = slow

    def loss(self, outputs, batch):
        wait = tf.numpy_function(lambda: time.sleep(0.1 * self.slow) or np.float32(0), [], tf.float32)
        with tf.control_dependencies([wait]):
            outputs = tf.identity(outputs)
        return super().loss(outputs, batch)


def figures_of_a_slow_one(strategy: MultiWorker, folder: pathlib.Path) -> dict:
    """Trains for a while with the last worker slowed: what each worker's figures are, and who is warned of."""
    state = bound(strategy, Slowed(strategy.host == strategy.num_hosts - 1))
    window = hooks.Windowed(1000)
    hook = Stragglers(strategy.host_names, window_seconds=0.3, windows=2)
    warnings = []
    logging.logger.addFilter(lambda record: warnings.append(record.getMessage()))
    board = TensorBoard(str(folder / "tensorboard") if strategy.is_chief else None, every_steps=20)
    loop = Loop(strategy, state, [hooks.every_steps(20, lambda *_: None), window, hook, board], 40)
    loop.begin()
    loop.train_to(40)
    loop.end()
    return {"figures": window.window.totals.workers(), "warnings": [line for line in warnings if "is slow" in line]}


def out_of_step(strategy: MultiWorker) -> str:
    """A value of one worker's copy is changed by one bit: what comparing says before and after."""
    state = bound(strategy, Mlp((32,)))
    status = Loop(strategy, state, [], 1000).status
    check = SyncCheck(1, strategy.replica_names)
    check.begin(status)
    check.act(status)
    if strategy.host == strategy.num_hosts - 1:
        bias = strategy.distribution.experimental_local_results(state.trainer.model.trainable_variables[1].value)[0]
        bias.assign(np.nextafter(bias.numpy(), 1, dtype=np.float32))
    try:
        check.act(status)
    except OutOfSyncError as error:
        return str(error)


def of_own_numbers(strategy: MultiWorker) -> list[list[float]]:
    """The values of variables, of numbers that differ by worker, as they are made, and of one made of another."""
    numbers = np.random.default_rng(strategy.host)

    def make():
        first = tf.Variable(numbers.normal(size=3), name="first")
        made = [first, tf.Variable(numbers.normal(), name="scalar"), tf.Variable(2 * first, name="second")]
        return types.SimpleNamespace(variables=lambda: made, variable_specs=lambda: [v.name for v in made])

    return [variable.numpy().tolist() for variable in strategy.build(make).variables()]


def on(distribution, task: WorkerTask, options: FeedOptions) -> MultiWorker:
    return MultiWorker(distribution, StrategyOptions(task=task, feed_options=options))


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    cluster = tf_config.from_environment(os.environ)
    task = WorkerTask(cluster.index, *zip(*cluster.addresses, strict=True))
    plain = devices.create("multi_worker", task=task)
    found = {"feeds": {}}
    for name, (source, options) in sources(folder).items():
        found["feeds"][name] = seen(on(plain.distribution, task, options), source)
    streamed = on(plain.distribution, task, FeedOptions(resident_bytes=0))
    in_files = SourceSlice(InFiles(folder), 0, EVAL_EXAMPLES)
    found["evaluations"] = evaluated(plain, arrays(EVAL_EXAMPLES)) + evaluated(streamed, in_files)
    found["exchanged"] = plain.exchange(10**12 + task.worker)
    found["crossed"] = crossed(plain)
    found["centred"] = centred(plain)
    found["cnn"] = curve(plain, Cnn(), 100)
    found["agreement"] = agreement(plain)
    found["slow"] = figures_of_a_slow_one(plain, folder)
    found["own numbers"] = of_own_numbers(plain)
    found["out of step"] = out_of_step(plain)
    (folder / f"found-{task.worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
