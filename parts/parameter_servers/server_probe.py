"""Detects parameter servers that don't answer, so that a coordinator does not wait for ever.

A process that has ended refuses connections at once. For one that is stopped or unreachable, TensorFlow waits without
limit: for a variable's value, a checkpoint's file, its part of an update.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from ...engine.machine.threads import end_process

_PERIOD_SECONDS = 1.0
_ANSWER_SECONDS = 3.0  # timeout of a worker's answer


def probe(job: str, task: int) -> None:
    """Asks a task for its time; returns once it has answered, or refused."""
    with contextlib.suppress(Exception), tf.device(f"/job:{job}/task:{task}/device:CPU:0"):
        tf.timestamp()  # without an input: sending a constant holds Python's lock


def silent(job: str, tasks: Iterable[int]) -> list[int]:
    """Returns the tasks of a job that don't answer within seconds, since they are stopped or unreachable."""
    # Daemons: the process must not wait for a thread that waits for a stopped task.
    threads = {task: threading.Thread(target=probe, args=(job, task), daemon=True) for task in tasks}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + _ANSWER_SECONDS
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return [task for task, thread in threads.items() if thread.is_alive()]


def explain(servers: Sequence[int], addresses: Sequence[str], timeout_seconds: float) -> str:
    """Describes servers that don't answer, in one line."""
    names = " and ".join(f"ps {server} ({addresses[server]})" for server in servers)
    return (
        f"{names} {'have' if len(servers) > 1 else 'has'} not answered for step_timeout_seconds={timeout_seconds:g}: "
        "stopped, or out of reach; start the job again: it continues from the newest snapshot or checkpoint"
    )


@contextlib.contextmanager
def watched(
    addresses: Sequence[str],
    timeout_seconds: float,
    probe_server: Callable[[int], None],
    end: Callable[[str], None] | None = None,
):
    """Ends this process if a server does not answer for too long within the context.

    Time in which this process itself was stopped does not count.

    Args:
      addresses: the addresses of the servers, host:port.
      timeout_seconds: the time within which a server has to answer; 0 disables the check.
      probe_server: returns once a server has answered; called repeatedly, in a thread per server.
      end: called with the message; None prints it and the stacks, and ends the process.
    """
    if not timeout_seconds:
        yield
        return
    over, period = threading.Event(), min(_PERIOD_SECONDS, timeout_seconds / 8)
    answered = [time.monotonic()] * len(addresses)

    def keep_asking(server: int) -> None:
        while not over.wait(period):
            probe_server(server)
            answered[server] = time.monotonic()

    def watch() -> None:
        before = time.monotonic()
        while not over.wait(period):
            now = time.monotonic()
            # This process was stopped, and its servers had no chance to answer.
            if now - before > 4 * period:
                answered[:] = [at + now - before for at in answered]
            before = now
            late = [server for server, at in enumerate(answered) if now - at > timeout_seconds]
            if late:
                (end or end_process)(explain(late, addresses, timeout_seconds))
                return

    # Daemons: the process must not wait for a thread that waits for a stopped server.
    for server in range(len(addresses)):
        threading.Thread(target=keep_asking, args=(server,), name=f"ask-ps-{server}", daemon=True).start()
    threading.Thread(target=watch, name="servers", daemon=True).start()
    try:
        yield
    finally:
        over.set()
