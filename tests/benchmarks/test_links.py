"""`benchmarks.links`: what links of a rate, a delay and losses do to packets of real sockets."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.links import Hosts, Link, on_hosts
from benchmarks.processes import run_together
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="network namespaces take root and /dev/net/tun"
    ),
]

ECHOES = """
import socket, sys
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], 5000))
print("listens", flush=True)
while True:
    udp.sendto(*udp.recvfrom(1000))
"""
ASKS = """
import socket, sys, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(0.1)
count, times = int(sys.argv[2]), []
for turn in range(count):
    before = time.monotonic()
    udp.sendto(b"%d" % turn, (sys.argv[1], 5000))
    try:
        while udp.recv(1000) != b"%d" % turn:
            pass
        times.append(time.monotonic() - before)
    except TimeoutError:
        pass
print(min(times), 1 - len(times) / count)
"""
RECEIVES = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listens", flush=True)
connection, _ = server.accept()
size, before = 0, time.monotonic()
while data := connection.recv(1 << 20):
    size += len(data)
print(8 * size / (time.monotonic() - before))
"""
SENDS = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def exchange(hosts: Hosts, serves: str, asks: str, *arguments: str) -> tuple[str, str]:
    """Runs a server on the last host and its client on the first, which wait for no core, and returns their output."""

    def started(host: int, program: str, *more: str) -> subprocess.Popen:
        python = ("chrt", "--rr", "1", sys.executable, "-c", program, hosts.addresses[-1], *more)
        return subprocess.Popen(hosts.command(host, *python), stdout=subprocess.PIPE, text=True)

    with started(len(hosts.addresses) - 1, serves) as server:
        try:
            assert server.stdout.readline() == "listens\n"
            with started(0, asks, *arguments) as client:
                printed = client.communicate(timeout=PATIENCE)[0]
            return printed, server.communicate(timeout=PATIENCE)[0] if serves is RECEIVES else ""
        finally:
            server.kill()


def round_trip(hosts: Hosts, count: int = 20) -> tuple[float, float]:
    """Returns the seconds of the shortest round trip of a packet, and the share of packets that was lost."""
    seconds, lost = map(float, exchange(hosts, ECHOES, ASKS, str(count))[0].split())
    return seconds, lost


def test_a_round_trip_takes_two_delays():
    with Hosts(3, Link(delay_seconds=0.02)) as hosts:
        assert 0.04 <= round_trip(hosts)[0] < 0.045


def test_a_share_of_packets_is_lost():
    with Hosts(2, Link(loss=0.2)) as hosts:
        assert 0.15 < round_trip(hosts, 80)[1] < 0.55  # of there and back, 36 %


@pytest.mark.parametrize(("rate", "delay", "megabytes"), [(1e8, 0.0, 20), (1e9, 0.01, 200)])
def test_a_stream_travels_at_the_rate_of_the_link(rate, delay, megabytes):
    with Hosts(2, Link(rate, delay)) as hosts:
        found = []
        for _ in range(3):
            found.append(float(exchange(hosts, RECEIVES, SENDS, str(megabytes * 1_000_000))[1]))
            if found[-1] > 0.8 * rate:
                break
        assert 0.8 * rate < max(found) < rate, found  # headers, and TCP's slow start, take their share


@pytest.mark.slow
def test_leases_over_a_slow_link_are_more_than_steps(tmp_path):
    """A step takes 0.2 s, and what begins and ends a lease longer: leases of a quarter of a second would be 40."""
    path = tmp_path / "result.json"
    words = ("train", "--model=logistic", "--input=digits", "--mode=train", "--train_steps=40", "--jit=off")
    words += ("--strategy=parameter_server", f"--result_json={path}")
    with Hosts(2, Link(delay_seconds=0.05)) as hosts:
        run_together(on_hosts(hosts, 1, 1, (sys.executable, "-m", "crankshaft", *words)))
    result = json.loads(path.read_text())
    assert (result["step"], result["leases"]["retried"]) == (40, 0)
    assert result["leases"]["done"] <= 20


def test_nothing_is_left_of_hosts_whose_process_was_killed(tmp_path):
    program = """
        import os, time
        from benchmarks.links import Hosts, Link
        with Hosts(2, Link()) as hosts:
            print(hosts.command(0)[1], flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as user:
        space = user.stdout.readline().strip().partition("=")[2]
        assert os.path.exists(space)
        user.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while os.path.exists(space) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(space)
