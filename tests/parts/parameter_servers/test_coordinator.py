"""How long leases last, what the coordinator does about those that do not come back, and what TensorFlow prints."""

import contextlib
import socket
import threading
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer
from crankshaft.engine.data.feeds.feed import CallInput
from crankshaft.engine.errors import LostPeerError, SaveError
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.strategies import ClusterAddresses, ServerOptions, StrategyOptions
from crankshaft.parts.parameter_servers import coordinator
from crankshaft.parts.parameter_servers.coordinator import Leases, lease_seconds
from crankshaft.parts.parameter_servers.leases import Counters
from crankshaft.parts.parameter_servers.strategy import ParameterServer

TIMEOUT_SECONDS = 1.0
ADDRESSES = ClusterAddresses("localhost:3", ("localhost:2",), ("localhost:1",))
OPTIONS = StrategyOptions(servers=ServerOptions(ADDRESSES))


class Loop:
    function = None
    first_batch = 0


class CountersHere(Counters):
    """On this process's device: there is no server."""

    def __init__(self, slots: int):
        self.counts, self.takers = (tf.Variable(tf.zeros([size], tf.int64)) for size in (1 + 2 * slots, slots))
        self._slots = slots


@pytest.fixture
def leases(monkeypatch):
    """`Leases` of one worker and one server, which are ports here, and the events after which each one is back."""
    monkeypatch.setattr(coordinator, "Counters", CountersHere)
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(3)]
        chief, worker, server = (f"localhost:{each.getsockname()[1]}" for each in tasks)
        may_return = []

        def schedule(function, args):
            may_return.append(threading.Event())

            def fetch(back=may_return[-1]):
                back.wait()
                return np.zeros(2 + 5 + 4), []  # a `LeaseResult` without metrics, and no rows

            return types.SimpleNamespace(fetch=fetch)

        found = Leases(
            types.SimpleNamespace(schedule=schedule),
            ClusterAddresses(chief, (worker,), (server,)),
            timeout_seconds=TIMEOUT_SECONDS,
            describe=lambda lease, step: f"steps {lease.first} to {lease.stop - 1}",
            fault_of_data=lambda error: None,
        )
        yield found, may_return
        for each in may_return:
            each.set()


@pytest.mark.slow
def test_the_first_of_a_loop_may_take_five_times_as_long_since_its_graph_is_built(leases):
    leases, may_return = leases
    loops = [Loop() for _ in range(2)]
    leases.schedule(loops[0], CallInput((), 0, 1))
    assert leases.collect(2 * TIMEOUT_SECONDS) == []
    may_return[0].set()
    assert len(leases.collect(30)) == 1
    leases.schedule(loops[0], CallInput((), 1, 2))
    with pytest.raises(LostPeerError, match="no update for step_timeout_seconds=1: no worker has started a lease"):
        leases.collect(30)
    may_return[1].set()
    assert len(leases.collect(30)) == 1
    leases.schedule(loops[1], CallInput((), 2, 3))
    with pytest.raises(LostPeerError, match="no update for 5 times step_timeout_seconds=1: no worker has started"):
        leases.collect(30)


def test_a_call_that_reaches_its_limit_completes_all_that_is_in_progress(leases):
    """Also what earlier calls, with other limits, have scheduled: a hook that is then due finds no update half made."""
    leases, may_return = leases

    class Scheduled(ParameterServer):
        def __init__(self):
            super().__init__(None, OPTIONS)
            self._leases, self._next_step = leases, 4
            self._inventory = Inventory(Trainer())

    strategy, done = Scheduled(), []
    feed = types.SimpleNamespace(count=done.extend, order=types.SimpleNamespace(steps_per_epoch=100))
    program: Any = Loop()
    program.__dict__ |= {"step": 0, "state": None, "feed": feed, "pace": None, "metric_specs": []}
    program.__dict__ |= {"steps_per_call": 8, "steps_per_collection": 8, "advance": done.append}
    for first in (0, 2):
        leases.schedule(program, CallInput((), first, first + 2))
    for seconds, back in zip((0.15, 0.4), may_return, strict=True):  # the first when a call returns what it has
        threading.Timer(seconds, back.set).start()
    assert strategy.run(program, 1).steps == 4
    assert strategy.in_step
    assert len(may_return) == 2  # no others are scheduled


def test_of_many_workers_each_lease_lasts_longer():
    """The coordinator takes them back one by one: as many a second from 32 workers as from 8."""
    assert lease_seconds(1) == lease_seconds(8)
    assert 32 / lease_seconds(32) == 8 / lease_seconds(8)


@pytest.mark.parametrize("where", [" from remote target /job:ps/replica:0/task:0", ""])
def test_a_checkpoint_that_a_lost_server_keeps_from_being_written_names_it(where):
    """And one whose own file system is out of reach says what it says."""
    strategy = ParameterServer(None, OPTIONS)
    expected = LostPeerError if where else SaveError
    with (
        pytest.raises(expected, match=r"ps 0 \(localhost:1\) is lost" if where else "could not be written"),
        strategy.watch(),
    ):
        raise SaveError("ckpt-1 could not be written") from tf.errors.UnavailableError(None, None, f"closed{where}")
