"""How many leases one coordinator assigns per second, to stand-in workers that only answer. A script, not a test.

A second process serves for all workers and the one server. The coordinator's CPU seconds per lease say how many leases
it can assign, since most of them are Python's, which uses one core. With --step_ms the stand-ins wait that long for
each step, and all leases end every --join_steps steps, as before a checkpoint: measured beside leases of equal shares
of what is left. Run it from the repository:
`.venv/bin/python -m benchmarks.leases --workers=64`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from crankshaft.engine.data.feeds.feed import CallInput
from crankshaft.engine.internals.tensorflow import answer_to, called_by_name
from crankshaft.engine.strategies import ClusterAddresses
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.parameter_servers.coordinator import Leases, lease_seconds, lease_steps
from crankshaft.parts.parameter_servers.leases import LAGS, Lease
from crankshaft.parts.parameter_servers.strategy import connect

from .processes import run_script

METRICS = 3  # rows of sums, as of a loss and two metrics
WAIT = "benchmarks/wait"


class StandIn:
    """A loop whose leases are answered at once, or after `step_seconds` for each step."""

    first_batch = 0

    def __init__(self, step_seconds: float):
        self._step_seconds = step_seconds
        self.function = self._answer.get_concrete_function()

    @tf.function(input_signature=[(), tf.TensorSpec([len(Lease._fields)], tf.int64)])
    def _answer(self, operands, lease):
        first = tf.cast(lease[4], tf.float64)
        if self._step_seconds:
            with tf.device("/device:CPU:0"):
                (first,) = called_by_name(
                    WAIT, [first, tf.cast(lease[5], tf.float64) - first, self._step_seconds], [tf.float64]
                )
        worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.float64)
        zero = tf.zeros([], tf.float64)
        sums = tf.zeros([2 * METRICS + 2 + LAGS], tf.float64)
        return tf.concat([sums, tf.stack([first, zero, zero, zero, worker]), tf.zeros([4], tf.float64)], 0), []


def wait(first: np.ndarray, steps: np.ndarray, step_seconds: np.ndarray) -> list[np.ndarray]:
    time.sleep(float(steps) * float(step_seconds))
    return [np.asarray(first)]


def serve(cluster: dict[str, list[str]]) -> None:
    """Answers for all workers and servers until this process is ended."""
    answer_to(WAIT, wait)
    # All servers of a process share one pool, in which each stand-in holds a thread while it waits.
    options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8 + 2 * len(cluster["worker"]))
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc", config=options)
        for job in ("worker", "ps")
        for index in range(len(cluster[job]))
    ]
    print(f"{len(servers)} tasks serve", flush=True)
    threading.Event().wait()


def run(leases: Leases, loop: StandIn, steps: int, length: Callable[[int], int]) -> tuple[int, float, float]:
    """Runs leases of `length(steps left)` steps; returns how many, and the wall and the CPU seconds."""
    wall, cpu, left, before = time.monotonic(), time.process_time(), steps, leases.ledger.done
    while left or leases.num_open:
        for _ in range(leases.room):
            if left:
                taken = length(left)
                leases.schedule(loop, CallInput((), steps - left, steps - left + taken))
                left -= taken
        leases.collect(10.0)
    return leases.ledger.done - before, time.monotonic() - wall, time.process_time() - cpu


def measure(leases: Leases, arguments: argparse.Namespace) -> None:
    workers, seconds, steps = arguments.workers, arguments.step_ms / 1000, arguments.join_steps
    loop = StandIn(seconds)
    run(leases, loop, 2 * workers, lambda left: 1)  # each worker builds the function
    if not seconds:
        count, wall, cpu = run(leases, loop, arguments.leases, lambda left: 1)
        print(f"{workers} workers: {count / wall:,.0f} leases/s, {1e3 * cpu / count:.2f} ms of CPU per lease")
        return
    most = max(1, round(lease_seconds(workers) / seconds))
    ways = {
        "not shorter than pays": lambda left: lease_steps(left, workers, most, seconds),
        "equal shares": lambda left: min(most, math.ceil(left / workers)),
    }
    for way, length in ways.items():
        count, wall, cpu = run(leases, loop, steps, length)
        print(f"{workers} workers, {steps:,} steps of {arguments.step_ms:g} ms, {way}: {count:,} leases, {wall:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64, help="stand-ins (%(default)s)")
    parser.add_argument("--leases", type=int, default=2000, help="that are answered at once (%(default)s)")
    parser.add_argument("--step_ms", type=float, default=0.0, help="for which a stand-in waits (%(default)s)")
    parser.add_argument("--join_steps", type=int, default=10_000, help="after which all leases end (%(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
    coordinator, server, *workers = (f"localhost:{port}" for port in free_ports(arguments.workers + 2))
    cluster = {"chief": [coordinator], "worker": workers, "ps": [server]}
    command = [sys.executable, "-m", "benchmarks.leases", f"--serve={json.dumps(cluster)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}) as tasks:
        try:
            tasks.stdout.readline()
            addresses = ClusterAddresses(coordinator, tuple(workers), (server,))
            made = tf.distribute.coordinator.ClusterCoordinator(connect(addresses))
            named = {"describe": lambda *_: "a lease", "fault_of_data": lambda error: None}
            measure(Leases(made, addresses, timeout_seconds=0.0, **named), arguments)
        finally:
            tasks.kill()


if __name__ == "__main__":
    run_script(main)
