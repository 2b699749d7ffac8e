"""What a worker tells the others arrives, whatever is in it."""

import contextlib
import socket

import pytest

from crankshaft.engine.health.peers import Peers


def two_peers():
    """The channels of two workers of one job, on ports that nobody had a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    return [Peers(worker, ("worker 0", "worker 1"), addresses) for worker in range(2)]


@pytest.mark.parametrize(
    ("farewell", "heard"),
    [
        ("no such file: data/a.txt", "no such file: data/a.txt"),
        ("", ""),
        ("a" * 1000, "a" * 400),
        ("\u00fc" * 1000, "\u00fc" * 200),
        ("a" + "\u00fc" * 1000, "a" + "\u00fc" * 199),
        ("\u6570" * 1000, "\u6570" * 133),
        ("\U0001f525" * 1000, "\U0001f525" * 100),
        ("\x1b" * 1000, "\x1b" * 400),
        ("no such file: \udce4.txt", "no such file: .txt"),  # a name that is no UTF-8, as Python has it
    ],
    ids=["short", "empty", "long", "two bytes", "odd", "three bytes", "four bytes", "escaped", "no text"],
)
def test_a_farewell_arrives_up_to_its_length(farewell, heard):
    teller, listener = two_peers()
    for each in (teller, listener):
        each.open()
    try:
        teller.tell(7, 8, 9, farewell, 1)
        listener.listen(0.5)
    finally:
        for each in (teller, listener):
            each.close()
    found = listener.heard[0]
    assert (found.step, found.beats, found.arrived, found.lost) == (7, 8, 9, 1)
    assert found.farewell == heard
