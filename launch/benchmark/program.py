"""This program as a command that can be run again with other flags, in a separate process. Host code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import flags
from absl.testing import flagsaver

from ..cluster import shares
from ..command_line import rules

NAME = "crankshaft train"  # its first argument, where a script has its path
TRAIN = ("-m", "crankshaft", "train")
# Flags that concern several runs as a whole, or are expanded into other flags, and are not passed on.
_OF_THE_WHOLE = (
    "benchmark_sweep benchmark_replicas baseline baseline_cmd fail_below result_json result_html flagfile config"
).split()


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that this process was asked to run, without the flags that make it run several times.

    Attributes:
      start: what Python runs: ("-m", module) or (script,).
      check: called with environment variables while flags are as a run will have them; raises `UsageError`.
      cluster: crankshaft local's own flags, where that starts the run's processes; None where there is one process.
      tasks: how many there are of each type then; the first task of the first type prints.
      unknown: arguments that only the script knows.
    """

    start: tuple[str, ...]
    check: Callable[[Mapping[str, str]], None]
    cluster: tuple[str, ...] | None = None
    tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def command(self, settings: Mapping[str, str]) -> list[str]:
        """Returns the command line of a run with these flags set, by name."""
        replaced = {name for name in settings if not _is_repeated(flags.FLAGS[name])}
        values = [f"--{name}={value}" for name, value in settings.items()]
        rest = [*_given({*_OF_THE_WHOLE, *replaced}), *values, *self.unknown]
        if self.cluster is None:
            return [sys.executable, *self.start, *rest]
        script = () if self.start == TRAIN else self.start
        # A benchmark that fails has to be reported, not restarted.
        return [sys.executable, "-m", "crankshaft", "local", *self.cluster, "--max_restarts=0", "--", *script, *rest]

    def with_workers(self, count: int, cores_per_task: int) -> Program:
        """Returns the same program on so many processes that train together."""
        flags_ = (*(self.cluster or ()), f"--workers={count}", f"--cores_per_task={cores_per_task}")
        return dataclasses.replace(self, cluster=flags_, tasks={**self.tasks, "worker": count})

    def check_run(self, settings: Mapping[str, str]) -> None:
        """Raises `UsageError` if a run with these flags set is a mistake."""
        environment = dict(os.environ)
        if self.tasks:
            environment["TF_CONFIG"] = json.dumps(_cluster_of(self.tasks))
        with _set(settings):
            self.check(environment)


def of_this_process(argv: Sequence[str], check: Callable[[Mapping[str, str]], None]) -> Program:
    """Returns crankshaft train, or the script that called its `main` with this command line."""
    if argv[0] == NAME:
        return Program(TRAIN, check)
    spec = sys.modules["__main__"].__spec__
    return Program((argv[0],) if spec is None else ("-m", spec.name), check)


def _given(leave_out: set[str]) -> list[str]:
    """Returns the flags that the command line sets, those of a --flagfile too."""
    found = []
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present and name == flag.name and name not in leave_out:  # a short name is the same flag again
            values = flag.value if _is_repeated(flag) else [flag.value]
            found += [f"--{name}={_as_text(flag, value)}" for value in values]
    return found


def _as_text(flag: flags.Flag, value) -> str:
    return str(value).lower() if flag.boolean else flag.serializer.serialize(value)


def _is_repeated(flag: flags.Flag) -> bool:
    return isinstance(flag, flags.MultiFlag)


@contextlib.contextmanager
def _set(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets flags, within, as if they had been given. Raises `UsageError` if one can't have its value."""
    with flagsaver.flagsaver():
        for name, value in settings.items():
            flag = flags.FLAGS[name]
            try:
                if _is_repeated(flag):
                    flag.value = list(flag.value)  # absl adds to the list that it has
                    flag.parse([value])
                else:
                    flag.parse(value)
            except flags.Error as error:
                raise rules.explain(error, flags.FLAGS) from None
        yield


def _cluster_of(tasks: Mapping[str, int]) -> dict:
    """Returns a TF_CONFIG as crankshaft local will make it."""
    ports = iter(shares.free_ports(sum(tasks.values())))
    cluster = {kind: [f"{shares.LOOPBACK}:{next(ports)}" for _ in range(count)] for kind, count in tasks.items()}
    return {"cluster": cluster, "task": {"type": next(iter(tasks)), "index": 0}}
