"""The faults: one table. Each row names a fault, what it may strike, and what must hold afterwards. To add one, add a
row, and a small function if no other row has it.

After every fault, once it is mended, a job must end as an undisturbed one, however often its scheduler has started it.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Callable
from typing import Any

SYNCHRONOUS = ("one_device", "two_workers", "mesh")
SEVERAL = ("two_workers", "mesh", "servers")
ALL = ("one_device", *SEVERAL)


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault that happens in a run.

    Attributes:
      fault: its name in `FAULTS`.
      target: what it strikes: a task by its name, "tasks" or "supervisor".
      step: the job's step that triggers it.
      delay_seconds: from that step on.
      seconds: until it is mended; None is never.
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
      name: of it.
      act: does it, and returns a function that mends it, or None. Takes the `Job` and the `Injection`; inside a task,
        its `Status` instead of the job.
      targets: the kinds of what it strikes: "task" (any one), "worker", "tasks" (all at once), "supervisor", "job".
      strategies: those under which it is injected.
      seconds: the least and the most until it is mended; None: it is not.
      inside: it happens in the process of its target, a task.
      says: a regular expression that the job's output must then have.
    """

    name: str
    act: Callable[..., Callable[[], None] | None]
    targets: tuple[str, ...]
    strategies: tuple[str, ...] = ALL
    seconds: tuple[float, float] | None = None
    inside: bool = False
    says: str = ""


def send(number: signal.Signals) -> Callable[[Any, Injection], None]:
    return lambda job, injection: job.send(injection.target, number)


def stop(job, injection: Injection) -> Callable[[], None]:
    job.send(injection.target, signal.SIGSTOP)
    return lambda: job.send(injection.target, signal.SIGCONT)


_ANY = ("task", "tasks", "supervisor")
_ROWS = [
    Fault("SIGKILL", send(signal.SIGKILL), _ANY),
    Fault("SIGTERM", send(signal.SIGTERM), _ANY),
    Fault("SIGHUP", send(signal.SIGHUP), _ANY),
    Fault("SIGSTOP for seconds", stop, _ANY, seconds=(0.5, 4)),
    Fault("SIGSTOP for ever", send(signal.SIGSTOP), ("task",), SEVERAL),
]
FAULTS = {row.name: row for row in _ROWS}


def sample(rng: random.Random, fault: Fault, tasks: tuple[str, ...], steps: int) -> Injection:
    """Returns where and when a fault happens, by the seed's generator.

    Args:
      rng: of the seed.
      fault: the row.
      tasks: the job's.
      steps: of the training.
    """
    kind = rng.choice(fault.targets)
    within = {"task": tasks, "worker": [task for task in tasks if task.startswith("worker")]}.get(kind, [kind])
    return Injection(
        fault.name,
        rng.choice(within),
        step=rng.randrange(1, steps * 9 // 10),
        delay_seconds=round(rng.uniform(0, 0.1), 3),
        seconds=fault.seconds and round(rng.uniform(*fault.seconds), 1),
    )
