"""The faults: one table. Each row names a fault, what it may strike, and what must hold afterwards. To add one, add a
row, and a small function if no other row has it.

After every fault, once it is mended, a job must end as an undisturbed one, however often its scheduler has started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..links import Link, Loopback, lacks_loopback
from . import machine

SYNCHRONOUS = ("one_device", "two_workers", "mesh")
SEVERAL = ("two_workers", "mesh", "servers")
ALL = ("one_device", *SEVERAL)
ELASTIC = ("hosts",)
DRAWN = ("program",)


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault that happens in a run.

    Attributes:
      fault: its name in `FAULTS`.
      target: what it strikes: a task by its name, "tasks", "supervisor" or "host".
      step: the job's step that triggers it.
      delay_seconds: from that step on.
      seconds: from the fault until it is mended; None is never.
    """

    fault: str
    target: str
    step: int
    delay_seconds: float
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
      name: the fault's name.
      act: does it, and returns a function that is called some seconds later and mends it, or None. Takes the `Job` and
        the `Injection`; inside a task, its `Status` instead of the job.
      targets: the kinds of what it strikes: "task" (any one), "training task" (one that has hooks), "tasks" (all at
        once), "supervisor", "host".
      strategies: those under which it is injected.
      seconds: the least and the most until then.
      inside: it happens in the process of its target, a task.
      ends: it may end the job with a line and exit code 2 or 65. It is then mended, and the job started again.
      says: a regular expression that the job's output must then have.
      slow_writes: whether the job's writes can be slow, see `Job.slow_now`.
      leaves_gaps: the record of metrics may have gaps.
      files: the job must read files.
      lacks: returns what this machine lacks for it; empty if nothing.
    """

    name: str
    act: Callable[..., Callable[[], None] | None]
    targets: tuple[str, ...]
    strategies: tuple[str, ...] = ALL
    seconds: tuple[float, float] | None = None
    inside: bool = False
    ends: bool = False
    says: str = ""
    slow_writes: bool = False
    leaves_gaps: bool = False
    files: bool = False
    lacks: Callable[[], str] = str


# -- Processes --------------------------------------------------------------------------------------------------------


def send(number: signal.Signals) -> Callable[[Any, Injection], None]:
    return lambda job, injection: job.send(injection.target, number)


def stop(job, injection: Injection) -> Callable[[], None]:
    job.send(injection.target, signal.SIGSTOP)
    return lambda: job.send(injection.target, signal.SIGCONT)


def lose_host(job, injection: Injection) -> Callable[[], None]:
    """Kills a task's agent, with which the kernel ends the task; it is started again once the host returns."""
    job.lost.add(injection.target)
    job.send(injection.target, signal.SIGKILL)
    return lambda: job.lost.discard(injection.target)


def take_memory(job, injection: Injection) -> None:
    """Lets a process have no more memory than it has: what it asks for next is refused."""
    for pid in job.processes(injection.target):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
            resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)


def jump(seconds: int) -> Callable:
    """Returns a fault that has a task's Python read another time; libfaketime would break `time.sleep`."""

    def act(status, injection):
        now = time.time
        time.time = lambda: now() + seconds

    return act


# -- The network ------------------------------------------------------------------------------------------------------


def disturb(**kind: float) -> Callable:
    """Returns a fault of all that tasks send each other, see `Link`."""
    return lambda job, injection: Loopback(Link(**kind)).close


def cut_off(job, injection: Injection) -> Callable[[], None]:
    """Lets no packet to or from a task's port through."""
    return Loopback(Link(ports=tuple(job.ports(injection.target)))).close


def speak_another_protocol(job, injection: Injection) -> Callable[[], None]:
    """Calls a task's port, sends what no gRPC server knows, and keeps the connection."""
    calls = contextlib.ExitStack()
    for port in job.ports(injection.target):
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", bytes(range(256)) * 64):
            with contextlib.suppress(OSError):
                calls.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1)).sendall(text)
            with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
                datagrams.sendto(text[:1000], ("127.0.0.1", port))
    return calls.close


# -- Files ------------------------------------------------------------------------------------------------------------


def fill_disk(job, injection: Injection) -> Callable[[], None]:
    job.disk.fill()
    return job.disk.clear


def make_read_only(job, injection: Injection) -> Callable[[], None]:
    job.disk.set_writable(False)
    return lambda: job.disk.set_writable(True)


def slow_down(job, injection: Injection) -> Callable[[], None]:
    job.slow_now.touch()
    return job.slow_now.unlink


def unmount(job, injection: Injection) -> Callable[[], None]:
    job.disk.unmount()
    return job.disk.mount


def spoil_data(change: Callable[[Path], None]) -> Callable:
    """Returns a fault of the longest data file, which is mended by what it was, at the time at which it was written."""

    def act(job, injection):
        path = max(job.data.iterdir(), key=lambda path: path.stat().st_size)
        content, status = path.read_bytes(), path.stat()

        def mend():
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        change(path)
        return mend

    return act


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"other" * 20)


def spoil_checkpoint(change: Callable[[Path], None]) -> Callable:
    """Returns a fault of the newest checkpoint's values, while all tasks start again and read it."""

    def act(job, injection):
        job.send("tasks", signal.SIGKILL)

        def spoil():
            written = sorted((job.run_dir / "checkpoints").glob("ckpt-*.data-*"), key=os.path.getmtime)
            if len(written) > 1:  # a run whose only checkpoint is broken does not start over: it ends with a line
                with contextlib.suppress(FileNotFoundError):
                    change(written[-1])

        return spoil

    return act


# -- Numbers ----------------------------------------------------------------------------------------------------------


def flip_bit(status, injection: Injection) -> None:
    """Flips one bit of a weight that every replica has, on this one."""
    import tensorflow as tf

    own = _weight(status)
    bits = tf.bitcast(own, tf.int32).numpy()
    bits[0] ^= 1 << 10
    own.assign(tf.bitcast(bits, tf.float32))


def write_nan(status, injection: Injection) -> None:
    """Makes a weight NaN on this replica, once."""
    own = _weight(status)
    own.assign(own * math.nan)


def _weight(status):
    """Returns this replica's copy of a weight that every replica has."""
    variable = status.state.trainer.model.trainable_variables[-1]
    (own,) = status.strategy.distribution.experimental_local_results(variable.value)
    return own


def expect_nan(status, injection: Injection) -> None:
    """Does nothing: the task's graph makes the next batch NaN (`training`), in the attempt in which this is called."""


NAN = "NaN in a batch"
_ANY = ("task", "tasks", "supervisor")
_TRAINING = ("training task",)
_WORKERS = ("two_workers", "mesh")
_LINK = {"targets": ("host",), "strategies": SEVERAL, "seconds": (1, 8), "lacks": lacks_loopback}
_DISK = {"targets": ("host",), "seconds": (0.5, 4), "leaves_gaps": True, "lacks": machine.enter}
_DATA = {"targets": ("host",), "ends": True, "seconds": (4, 8), "files": True}
_ROWS = [
    Fault("SIGKILL", send(signal.SIGKILL), _ANY, (*ALL, *ELASTIC, *DRAWN)),
    Fault("SIGTERM", send(signal.SIGTERM), _ANY, (*ALL, *ELASTIC)),
    Fault("SIGHUP", send(signal.SIGHUP), _ANY, (*ALL, *ELASTIC)),
    Fault("SIGSTOP for seconds", stop, _ANY, (*ALL, *ELASTIC), seconds=(0.5, 4)),
    Fault("SIGSTOP for ever", send(signal.SIGSTOP), ("task",), SEVERAL),
    Fault("no more memory", take_memory, ("task",)),
    Fault("clock jumps ahead", jump(86_400), _TRAINING, inside=True),
    Fault("clock jumps back", jump(-86_400), _TRAINING, inside=True),
    Fault("partition", cut_off, ("task",), SEVERAL, seconds=(0.5, 40), lacks=lacks_loopback),
    Fault("packet loss 10 %", disturb(loss=0.1), **_LINK),
    Fault("link of 1 Mbit/s", disturb(bits_per_sec=1e6), **_LINK),
    Fault("delay of 100 ms", disturb(delay_seconds=0.1), **_LINK),
    Fault("partition of agents", cut_off, ("task",), ELASTIC, seconds=(0.5, 20), lacks=lacks_loopback),
    Fault("host lost", lose_host, ("task",), ELASTIC, seconds=(0.5, 20)),
    Fault("another protocol", speak_another_protocol, ("task",), SEVERAL, seconds=(1, 8)),
    Fault("disk full", fill_disk, **_DISK),
    Fault("disk read-only", make_read_only, **_DISK),
    Fault("disk unmounted", unmount, **_DISK, ends=True),
    Fault("a second per write", slow_down, ("host",), seconds=(2, 8), slow_writes=True, lacks=machine.lacks_compiler),
    Fault("data file removed", spoil_data(os.remove), **_DATA),
    Fault("data file truncated", spoil_data(lambda path: os.truncate(path, 3000)), **_DATA),
    Fault("data file changed", spoil_data(overwrite), **_DATA),
    Fault("checkpoint corrupted", spoil_checkpoint(overwrite), ("host",), seconds=(0, 8)),
    Fault("checkpoint removed", spoil_checkpoint(os.remove), ("host",), seconds=(0, 8)),
    Fault(NAN, expect_nan, _TRAINING, inside=True, ends=True, says="is nan|not finite"),
    Fault("NaN in a weight", write_nan, _TRAINING, SYNCHRONOUS, inside=True, ends=True, says="is nan|not finite"),
    Fault("bit flip in a weight", flip_bit, _TRAINING, _WORKERS, inside=True, says="holds other values of"),
]
FAULTS = {row.name: row for row in _ROWS}


def sample(rng: random.Random, fault: Fault, tasks: tuple[str, ...], steps: int) -> Injection:
    """Returns where and when a fault happens, by the seed's generator.

    Args:
      rng: the seed's generator.
      fault: the row.
      tasks: the job's.
      steps: the number of training steps.
    """
    kind = rng.choice(fault.targets)
    training = tasks[:1] if tasks[0] == "chief" else tasks
    within = {"task": tasks, "training task": training}.get(kind, [kind])
    return Injection(
        fault.name,
        rng.choice(within),
        step=rng.randrange(1, steps * 3 // 4),
        delay_seconds=0.0 if fault.inside else round(rng.uniform(0, 0.1), 3),
        seconds=fault.seconds and round(rng.uniform(*fault.seconds), 1),
    )
