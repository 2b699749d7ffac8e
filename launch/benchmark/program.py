"""This program as a command that can be run again with other flags, in a separate process. Host code."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from ..cluster import shares

NAME = "crankshaft train"  # its first argument, where a script has its path
TRAIN = ("-m", "crankshaft", "train")
# Flags of the comparison, or that are expanded into other flags: they are not passed on.
_OF_THE_WHOLE = {"baseline", "baseline_cmd", "benchmark_rounds", "config", "fail_below", "flagfile", "result_json"}


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that this process was asked to run, without the flags that make it run several times.

    Attributes:
      start: what Python runs: ("-m", module) or (script,).
      check: called with environment variables; raises `UsageError` where a run would be a mistake.
      cluster: crankshaft local's own flags, where that starts the run's processes; None where there is one process.
      tasks: how many there are of each type then; the first task of the first type prints.
      unknown: arguments that only the script knows.
    """

    start: tuple[str, ...]
    check: Callable[[Mapping[str, str]], None]
    cluster: tuple[str, ...] | None = None
    tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def one_round(self) -> list[str]:
        """Returns the command line of a run of one round."""
        rest = [*_given(), "--benchmark_rounds=1", *self.unknown]
        if self.cluster is None:
            return [sys.executable, *self.start, *rest]
        script = () if self.start == TRAIN else self.start
        # A benchmark that fails has to be reported, not restarted.
        return [sys.executable, "-m", "crankshaft", "local", *self.cluster, "--max_restarts=0", "--", *script, *rest]

    def check_run(self) -> None:
        """Raises `UsageError` if a run would be a mistake."""
        environment = dict(os.environ)
        if self.tasks:
            environment["TF_CONFIG"] = json.dumps(_cluster_of(self.tasks))
        self.check(environment)


def of_this_process(argv: Sequence[str], check: Callable[[Mapping[str, str]], None]) -> Program:
    """Returns crankshaft train, or the script that called its `main` with this command line."""
    if argv[0] == NAME:
        return Program(TRAIN, check)
    spec = sys.modules["__main__"].__spec__
    return Program((argv[0],) if spec is None else ("-m", spec.name), check)


def _given() -> list[str]:
    """Returns the flags that the command line sets, those of a --flagfile too."""
    words = []
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present and name == flag.name and name not in _OF_THE_WHOLE:  # a short name is the same flag again
            values = flag.value if isinstance(flag, flags.MultiFlag) else [flag.value]
            words += [f"--{name}={_as_text(flag, value)}" for value in values]
    return words


def _as_text(flag: flags.Flag, value) -> str:
    return str(value).lower() if flag.boolean else flag.serializer.serialize(value)


def _cluster_of(tasks: Mapping[str, int]) -> dict:
    """Returns a TF_CONFIG as crankshaft local will make it."""
    ports = iter(shares.free_ports(sum(tasks.values())))
    cluster = {kind: [f"{shares.LOOPBACK}:{next(ports)}" for _ in range(count)] for kind, count in tasks.items()}
    return {"cluster": cluster, "task": {"type": next(iter(tasks)), "index": 0}}
