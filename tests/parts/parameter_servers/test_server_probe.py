"""Servers that are asked whether they are there: who stops to answer ends the run, whoever answers does not."""

from __future__ import annotations

import threading
import time

import pytest

from crankshaft.parts.parameter_servers import server_probe
from tests.waiting import PATIENCE

ADDRESSES = ("host1:2222", "host2:2222")


@pytest.fixture
def servers():
    """(ask, stopped): `stopped` is the number of the server that does not answer, in a list; none at first."""
    stopped, over = [], threading.Event()
    yield (lambda server: over.wait() if server in stopped else None), stopped
    over.set()


def test_a_server_that_stops_to_answer_is_named_within_the_time(servers):
    ask, stopped = servers
    ended, lines = threading.Event(), []
    with server_probe.watched(ADDRESSES, 2, ask, lambda line: (lines.append(line), ended.set())):
        assert not ended.wait(2.5)
        stopped.append(1)
        assert ended.wait(PATIENCE)
    assert lines == [
        "ps 1 (host2:2222) has not answered for step_timeout_seconds=2: stopped, or out of reach; start the job "
        "again: it continues from the newest snapshot or checkpoint"
    ]


def test_without_a_timeout_nobody_is_asked(servers):
    ask, stopped = servers
    stopped += [0, 1]
    with server_probe.watched(ADDRESSES, 0, ask, pytest.fail):
        time.sleep(0.3)


def test_nobody_is_named_once_the_watch_is_over(servers):
    ask, stopped = servers
    stopped.append(0)
    ended = threading.Event()
    with server_probe.watched(ADDRESSES, 0.5, ask, lambda _: ended.set()):
        pass
    assert not ended.wait(1.0)
