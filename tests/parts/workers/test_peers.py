"""What a worker tells the others arrives, whatever is in it; what a stranger tells does not."""

import contextlib
import errno
import functools
import json
import os
import socket
import threading
import zlib

import pytest

from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.workers.peers import LastHeard, Peers
from tests.waiting import wait_until

NAMES = ("worker 0", "worker 1")


@contextlib.contextmanager
def channels(*secrets, meets=True):
    """The channels of two workers, the first's and the second's secret, which have heard of each other."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    peers = [Peers(worker, NAMES, addresses, secret) for worker, secret in enumerate(secrets)]
    with contextlib.ExitStack() as stack:
        for each in peers:
            each.open()
            stack.callback(each.close)
        if meets:
            greet(*peers)
        yield peers


def greet(*peers):
    """Each tells what it is at, until all answers have come."""
    before = [dict(each.heard) for each in peers]
    for each in peers:
        each.send(0, 0, -1)
    wait_until(lambda: [each.listen(0.01) for each in peers] and all(map(has_heard, peers, before)))


def has_heard(peer, before):
    """Whether all others have told `peer` something since it had heard what is in `before`."""
    return peer.heard and all(peer.heard[other] != before.get(other) for other in peer.heard)


def hear(listener, **expected):
    """Has a peer listen until it has heard this of the first worker."""
    wait_until(
        lambda: listener.listen(0.01) or {name: getattr(listener.heard[0], name) for name in expected} == expected
    )


@pytest.fixture
def wire(monkeypatch):
    """All datagrams, as whoever reads the network has them: (where it was sent from, what was sent)."""
    seen = []

    class Tapped(socket.socket):
        def sendto(self, data, where):
            seen.append((self.getsockname(), data))
            return super().sendto(data, where)

    monkeypatch.setattr(socket, "socket", Tapped)
    return seen


def address_of(peer):
    host, port = peer.addresses[peer.worker].rsplit(":", 1)
    return host, int(port)


def sent_by(peer, wire):
    return [data for source, data in wire if source == address_of(peer)]


def inject(peer, *datagrams):
    """Sends datagrams to a peer from a port of nobody's, and has it listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in datagrams:
            stranger.sendto(datagram, address_of(peer))
    peer.listen(0.1)


@pytest.mark.parametrize(
    ("end_reason", "heard"),
    [
        ("no such file: data/a.txt", "no such file: data/a.txt"),
        ("", ""),
        ("a" * 1000, "a" * 400),
        ("\u00fc" * 1000, "\u00fc" * 200),
        ("a" + "\u00fc" * 1000, "a" + "\u00fc" * 199),
        ("\u6570" * 1000, "\u6570" * 133),
        ("\U0001f525" * 1000, "\U0001f525" * 100),
        ("\x1b[31m\x9b\x07 \u202e", "\\x1b[31m\\x9b\\x07 \\u202e"),
        ("no such file: \udce4.txt", "no such file: .txt"),  # a name that is not UTF-8, as Python has it
    ],
    ids=["short", "empty", "long", "two bytes", "odd", "three bytes", "four bytes", "escaped", "no text"],
)
@pytest.mark.parametrize("secret", [b"", b"a secret of the job"])
def test_the_reason_of_an_end_arrives_up_to_its_length(end_reason, heard, secret):
    with channels(secret, secret) as (teller, listener):
        teller.send(7, 8, 9, end_reason, 1)
        wait_until(lambda: listener.listen(0.01) or listener.heard[0].end_reason is not None)
    found = listener.heard[0]
    assert (found.step, found.beats, found.arrived, found.lost) == (7, 8, 9, 1)
    assert found.end_reason == heard


@pytest.mark.holds("`--bind=ADDRESS` is where")
@pytest.mark.parametrize(("bind", "free"), [("", []), ("127.0.0.2", ["127.0.0.1"])])
def test_bind_is_the_one_address_at_which_a_worker_listens(bind, free):
    (port,) = free_ports(1)
    peers = Peers(0, NAMES, (f"of-nobody.invalid:{port}", "127.0.0.1:9"), bind=bind)
    peers.open()
    left = []
    with contextlib.closing(peers):
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, contextlib.suppress(OSError):
                other.bind((host, port))
                left.append(host)
    assert left == free


def test_heartbeats_go_to_each_address_of_a_name_and_come_at_any(monkeypatch):
    """The first address of each name is of a network that is not connected (192.0.2.0/24 is kept for documents)."""
    addresses = tuple(f"host{worker}.invalid:{port}" for worker, port in enumerate(free_ports(2)))
    lookup = socket.getaddrinfo

    def with_two_addresses(host, port, family=0, kind=0, proto=0, flags=0):
        found = [lookup(number, port, family, kind, proto, flags) for number in ("192.0.2.1", "127.0.0.1")]
        return [info for infos in found for info in infos]

    monkeypatch.setattr(socket, "getaddrinfo", with_two_addresses)
    peers = [Peers(worker, NAMES, addresses) for worker in range(2)]
    with contextlib.ExitStack() as stack:
        for each in peers:
            each.open()
            stack.callback(each.close)
        greet(*peers)


def forged(peer, **changes):
    """A message of an end as one writes it who knows all that is known before: names, addresses, the port."""
    message = {
        "job": zlib.crc32(" ".join(peer.addresses).encode()),
        "worker": 0,
        "step": 1,
        "beats": 1,
        "arrived": -1,
        "end_reason": "bye",
        "lost": -1,
    }
    return json.dumps(message | {"process": "0" * 32, "number": 10, "to": ""} | changes).encode()


@pytest.mark.parametrize("secret", [b"", b"a secret of the job"])
def test_a_forged_end_is_not_heard(secret):
    with channels(secret, secret) as (teller, listener):
        before = listener.heard[0]
        inject(
            listener,
            forged(listener),
            b"\0" * 32 + forged(listener),
            forged(listener, process=before.process, number=99),
        )
        assert listener.heard[0] == before
        if secret:  # who reads the network knows all but the secret
            full = {"process": before.process, "number": 10**6, "to": teller.heard[1].process}
            inject(listener, forged(listener, **full), b"\0" * 32 + forged(listener, **full))
            assert listener.heard[0] == before
        teller.send(2, 3, 4)
        hear(listener, step=2)


@pytest.mark.parametrize("secret", [b"", b"a secret of the job"])
def test_what_an_earlier_process_said_counts_for_nothing_when_it_is_sent_again(wire, secret):
    with channels(secret, secret) as (teller, listener):
        teller.send(5, 5, 5, "an error of before", -1)
        hear(listener, end_reason="an error of before")
        teller.close()
        said = sent_by(teller, wire)
        again = Peers(0, NAMES, listener.addresses, secret)  # the worker, restarted
        again.open()
        greet(again, listener)
        assert listener.heard[0].end_reason is None
        inject(listener, *said)
        assert listener.heard[0].end_reason is None
        again.send(6, 6, 6)
        hear(listener, step=6)
        later = Peers(1, NAMES, listener.addresses, secret)  # and the listener
        listener.close()
        later.open()
        inject(later, *said)
        assert later.heard == {}
        greet(again, later)
        inject(later, *said)
        assert later.heard[0].end_reason is None
        again.close()
        later.close()


def test_a_newer_beat_takes_a_end_reason_back_and_an_older_one_does_not(wire):
    with channels(b"", b"") as (teller, listener):
        wire.clear()
        teller.send(1, 1, 1)
        teller.send(2, 2, 2, "bye")
        hear(listener, end_reason="bye")
        inject(listener, sent_by(teller, wire)[0])
        assert listener.heard[0].end_reason == "bye"
        teller.send(3, 3, 3)
        hear(listener, step=3, end_reason=None)


@pytest.mark.parametrize("secrets", [(b"a secret of the job", b"another one's secret"), (b"", b"a secret of the job")])
def test_workers_of_another_secret_do_not_hear_each_other(secrets):
    with channels(*secrets, meets=False) as peers:
        for each in peers:
            each.send(0, 0, -1)
        for each in (*peers, *peers):
            each.listen(0.1)
        assert [each.heard for each in peers] == [{}, {}]


def test_the_port_is_bound_at_the_workers_own_address(wire):
    with channels(b"", b"") as peers:
        assert {source for source, _ in wire} == {address_of(each) for each in peers}


def greet_all(listener):
    with contextlib.suppress(OSError):  # closed
        while True:
            connection, _ = listener.accept()
            connection.sendall(b"hello")
            connection.close()


def test_a_task_without_a_route_is_silent_and_one_whose_process_has_ended_is_not(monkeypatch):
    heard, (port,) = LastHeard({"ps 0": "127.0.0.1:1", "ps 1": "127.0.0.1:2"}), free_ports(1)
    refused = functools.partial(socket.create_connection, ("127.0.0.1", port))

    def connect(address, **timeout):
        if address[1] == 1:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return refused(**timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    heard.note(["ps 0", "ps 1"])
    wait_until(lambda: heard.silent(0.3) == ["ps 0"])
    assert heard.silent(0.3) == ["ps 0"]


def test_of_many_tasks_of_which_nothing_comes_the_one_that_is_stopped_is_found():
    """A few are asked at a time: those that answer are not asked again before others are."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        addresses = {f"ps {i}": f"127.0.0.1:{each.getsockname()[1]}" for i, each in enumerate(listeners)}
        for each in listeners[:-1]:
            stack.callback(each.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=greet_all, args=(each,), daemon=True).start()
        heard = LastHeard(addresses)
        assert heard.silent(0.1) == []  # of which nothing was ever heard
        heard.note(addresses)
        assert heard.silent(60.0) == []
        for _ in range(2):  # also where others are due again; on a busy machine one of those may answer late once
            wait_until(lambda: heard.silent(0.6) == ["ps 19"])
