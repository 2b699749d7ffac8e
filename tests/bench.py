"""What tests of the engine share: a trainer bound to data on any number of replicas, and what its replicas hold."""

from __future__ import annotations

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import StepOptions, Trainer
from crankshaft.engine.build import prepare
from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.data import form
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.data.source import Split
from crankshaft.engine.data.streamed import DatasetStream
from crankshaft.engine.hooks import saving
from crankshaft.engine.loop import Loop
from crankshaft.engine.mesh import sharded
from crankshaft.engine.metrics.sums import Sums
from crankshaft.engine.reduction import Reduction, per_replica
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.options import RunContext
from crankshaft.engine.strategies import FeedOptions, StrategyOptions
from crankshaft.engine.strategies.base import LoopResult
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.parts.sharding.mesh import lay_out
from crankshaft.parts.tables.eviction import make_eviction
from tests.arrays import assert_same
from tests.logical_cpus import make_four

make_four()

# Strategies whose feeds have iterators, up to the end of the process: one that is freed waits for a thread of
# TensorFlow that now and then sleeps for a minute (see `engine.data.streamed.untuned`).
_KEPT: list[Replicated] = []


@dataclasses.dataclass
class Bench:
    """A trainer on a strategy with its data, ready to run."""

    strategy: Replicated
    state: TrainState

    @property
    def trainer(self) -> Trainer:
        return self.state.trainer

    def run(self, limit: int) -> LoopResult:
        """Runs at most so many steps of training."""
        return self.strategy.run(self.strategy.training, limit)

    def train(self, until: int, calls_of: int | None = None) -> dict[str, tuple[float, float]]:
        """Runs up to step `until`, in calls that end at each multiple of `calls_of`; the metrics' (total, count)."""
        sums = Sums()
        while self.state.step < until:
            call = calls_of or until
            sums.add(self.run(min(until, (self.state.step // call + 1) * call) - self.state.step).sums)
        return sums.values()

    def curve(self, until: int, name: str = "loss") -> np.ndarray:
        """The metric's mean of each step up to `until`, but for steps that were left out."""
        values = []
        while self.state.step < until:
            total, count = self.run(1).sums.read()[name]
            if count:
                values.append(total / count)
        return np.array(values)

    def jump(self, step: int) -> None:
        """Stands at a step, as a run does that was resumed there."""
        self.state.advance(step - self.state.step)

    def copies(self, variable) -> list[np.ndarray]:
        """What each replica holds of a variable."""
        variable = variable.value if isinstance(variable, tf.keras.Variable) else variable
        return [part.numpy() for part in self.strategy.distribution.experimental_local_results(variable)]

    def held(self, variable) -> np.ndarray:
        """Returns the value of a variable, after a check that all replicas hold the same bits."""
        first, *others = self.copies(variable)
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

    def arrays(self) -> list[np.ndarray]:
        """Every variable of a checkpoint, on every replica, but the counters of Keras's seed generators."""
        found = []
        for variable in self.state.variables():
            if variable.dtype != tf.uint32:
                found += self.copies(variable)
        return found

    def loop(self, hooks, until: int, **how):
        """Trains by the outer loop with hooks; returns its last status."""
        return train_with_hooks(
            self.strategy, self.state, [*make_eviction(self.trainer.inventory), *hooks], until, **how
        )

    def checkpoints(self, folder, keep: int | None = None, about: dict | None = None) -> Checkpoints:
        return Checkpoints(folder, self.state.checkpoint, keep=keep, about=about or {})

    def saves(self, folder, hooks: list, every_steps: int = 0, **how) -> Checkpoints:
        """Adds a hook that saves checkpoints, and the state of `hooks` with them; returns the checkpoints."""
        saved = self.checkpoints(folder, **how)
        hooks.append(saving.Checkpointing(saved, every_steps, hooks))
        return saved

    def save(self, folder) -> None:
        """Writes a checkpoint of the current step."""
        self.checkpoints(folder).save(self.state.step, {"state": self.state.host_state()}, wait=True)

    def restore(self, folder, **how) -> Bench:
        """Restores the newest checkpoint of a folder; returns itself."""
        assert saving.restore(self.checkpoints(folder), self.state, **how) is not None
        return self


def assert_same_bits(made: Bench, folder, at: int, until: int, calls: tuple[int, int] = (1, 7)) -> None:
    """Checks that a run has the same bits in calls that end at multiples of some steps, after a resume at step `at`,
    and on each replica; leaves it at its end, with its checkpoint of step `at` in `folder`.

    Metrics' sums too, but for `gradient_norm` where it is looked at once a call.
    """
    put_back = made.state.make_restorer()

    def sums_to(step: int, calls_of: int | None) -> dict[str, list[float]]:
        sums = {name: np.asarray(pair).tolist() for name, pair in made.train(step, calls_of).items()}
        if not made.trainer.run_context.options.clip_norm:
            sums.pop("gradient_norm", None)
        return sums

    def new_process() -> None:
        put_back()
        made.strategy.close_feeds()

    before = sums_to(at, None)
    made.save(folder)
    after, arrays = sums_to(until, None), made.arrays()
    for variable in made.state.variables():
        if not (per_replica.differs(variable) or sharded.variable_sharding(variable) or variable.dtype == tf.uint32):
            made.held(variable)
    new_process()
    assert sums_to(at, calls[0]) == before
    assert sums_to(until, calls[0]) == after
    assert_same(made.arrays(), arrays)
    new_process()
    assert made.restore(folder).state.step == at
    assert sums_to(until, calls[1]) == after
    assert_same(made.arrays(), arrays)


def train_with_hooks(strategy, state, hooks, until: int, **how):
    """Trains by the outer loop, from its beginning to its end; returns its last status."""
    loop = Loop(strategy, state, hooks, until, **how)
    loop.begin()
    loop.train_to(until)
    loop.end()
    return loop.status


class _FirstWorker(Replicated):
    """The first of several workers, each with examples of its own; the others' replicas are here too, and have none."""

    def __init__(self, workers: int, *how):
        super().__init__(*how)
        self.host_names = [f"worker {i}" for i in range(workers)]

    def exchange(self, value=None) -> list:
        return [value, *[0] * (self.num_hosts - 1)]


@functools.cache  # the fixture stands in several folders, and each strategy is to be one in the process
def _distribution(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    # Groups of devices are known by number in a process, and each strategy counts from the same one unless told.
    kind = type("MirroredStrategy", (tf.distribute.MirroredStrategy,), {"_collective_key_base": 1000 * replicas})
    return kind([f"CPU:{i}" for i in range(replicas)])


def split_of(data) -> Split:
    """Arrays, a dataset or a split as feeds take it."""
    if isinstance(data, Split):
        return data
    return DatasetStream(data) if isinstance(data, tf.data.Dataset) else ArraySource(data)


@pytest.fixture(scope="session")
def distribution():
    """distribution(replicas): a `tf.distribute.Strategy` on logical CPUs, the same one each time."""
    return _distribution


@pytest.fixture(scope="session")
def bench(distribution):
    """bench(trainer, source, batch_size, replicas, ...): a `Bench`.

    With `unrolls`, small steps are unrolled as in long runs, which takes five traces of the step instead of one. With
    `workers`, the dataset is the own of the first of so many, and the replicas of the others have no examples.
    """

    def make(
        trainer: Trainer,
        source,
        batch_size: int,
        replicas: int = 1,
        *,
        num_classes: int | None = None,
        shuffle: bool = True,
        jit: bool = False,
        unrolls: bool = False,
        reduction: Reduction | None = None,
        feed: FeedOptions | None = None,
        eval_source=None,
        eval_batch_size: int | None = None,
        block_steps: int = 64,
        device: str | None = None,
        vocabulary: dict[str, int] | None = None,
        model: int = 1,
        workers: int = 1,
        shard_optimizer: bool = False,
        saved_data: dict | None = None,
        **options,
    ) -> Bench:
        options, source = StepOptions(**options), split_of(source)
        eval_source = None if eval_source is None else split_of(eval_source)
        on = tf.distribute.OneDeviceStrategy(device) if device else distribution(replicas)
        feed_options = feed or FeedOptions(auto_shard="off" if workers > 1 else "auto")
        how = StrategyOptions(feed_options=feed_options, steps_per_loop=block_steps)
        placed = "test", on, how, lay_out(on, {"model": model}, shard_optimizer)
        strategy = _FirstWorker(workers, *placed) if workers > 1 else Replicated(*placed)
        with strategy.scope():
            context = RunContext(options, num_classes, vocabulary, example=form.example(source))
            state = TrainState(prepare(trainer, context, reduction))
            state.build()
        state.jit = jit
        eval_feed = None if eval_source is None else strategy.eval_feed(eval_source, eval_batch_size or batch_size)
        train_feed = strategy.feed(source, batch_size, options.seed if shuffle else None, saved_data)
        strategy.bind(state, train_feed, eval_feed)
        strategy.training.unrolls = unrolls and strategy.training.unrolls
        if (feed and not feed.resident_bytes) or not all(each.by_index for each in (source, eval_source or source)):
            _KEPT.append(strategy)
        return Bench(strategy, state)

    return make


@pytest.fixture(scope="module")
def _compiled():
    return {}


@pytest.fixture
def compiled(_compiled):
    """compiled(key, make): a `Bench` that the module has made by `make()` before, with the values that it had then.

    A test that asks for one key several times gets as many of them.
    """
    given = collections.Counter()

    def get(key, make) -> Bench:
        place = key, given[key]
        given[key] += 1
        if place not in _compiled:
            made = make()
            _compiled[place] = made, made.state.make_restorer()
        made, put_back = _compiled[place]
        put_back()
        return made

    return get


@pytest.fixture(autouse=True)
def _float32_policy():
    """A test that sets a Keras policy leaves it to this to put float32's back."""
    yield
    tf.keras.config.set_dtype_policy("float32")
