"""Plan a run before paying for it: memory, speed, cost, and how much of its time failures take.

For example:

  crankshaft plan --model=mlp --input=digits
  crankshaft plan --model=transformer_lm --input=text --data_dir=books --precision=bfloat16 --on=h100 --hosts=1,8,64
  crankshaft plan --measure=this.yaml
  crankshaft plan --model=mlp --input=digits --on=this.yaml

Besides its own flags it takes those of crankshaft train. Nothing is trained, and no weight takes memory: the step is
traced. Without --strategy, the plan is for all devices of the hosts: one_device, mirrored or multi_worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import errors, explanations, terminal
from ..cluster import tf_config
from ..command_line import checks, help, own_flags, parsing, paths
from ..command_line import config as configs
from ..command_line.rules import Boolean, Number, Path, Text, flag
from ..errors import UsageError, setting
from ..host import process
from ..host.files import write_json, write_text
from ..host.signals import interruptible
from . import hardware, plot, report, simulation
from .estimate import Estimate, device_bytes, estimate
from .hardware import Hardware

if TYPE_CHECKING:
    from ..command_line.config import Config

TAKES_FLAGS_OF_TRAIN = True  # for `crankshaft complete`
_USAGE = "crankshaft plan [flags] [flags of train]"
_MOST_HOSTS = 50_000
_FIRST_PORT = 10_000
_ON_ONE_HOST = ("one_device", "mirrored")
_OF_TASKS = ("cluster_hosts", "task_index", "bind", "num_ps", "evaluator", "run_dir", "result_json")  # of no use here


def _check_hosts(text: str) -> None:
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_HOSTS for part in text.split(",")):
        raise ValueError(f"it is not a list of numbers from 1 to {_MOST_HOSTS:,}, such as 1,8,64")


@dataclasses.dataclass(kw_only=True)
class Flags:
    """The values of a command line, without those of the run."""

    on: str | None = flag(
        Text("a name or a path"),
        None,
        "Hardware: h100, a100, l4, tpu-v5e, or a YAML or JSON file; by default this machine, which is measured.",
    )
    hosts: str = flag(Text("numbers, e.g. 1,8,64", _check_hosts), "1", "Numbers of hosts to plan for.")
    simulate: bool = flag(Boolean(), False, "Simulate each number of hosts for 30 days: failures, jitter, leases.")
    plot: str | None = flag(Path(), None, "Plot examples per second and goodput by hosts: a .png, .svg or .pdf.")
    price_per_host_hour: float | None = flag(Number(above=0, upper=1e9), None, "In any currency; also of a server.")
    measure: str | None = flag(Path(), None, "Measure this machine, write it to this file, which --on takes, and end.")


def main(argv: list[str]) -> None:
    """Plans by the command line, and exits the process."""
    process.prepare_streams()
    try:
        with interruptible():
            code = _run(argv)
    except KeyboardInterrupt:
        code = errors.fail(errors.EXIT_INTERRUPTED, "interrupted")
    except Exception as error:  # the border of the program
        code = errors.fail(*explanations.explain(error, has_debug=False))
    sys.exit(code)


def _run(argv: list[str]) -> int:
    values, words = own_flags.read(argv, Flags, help.doc_of(__name__), _USAGE, takes_others=True)
    flags = Flags(**values)
    passed = parsing.from_argv([argv[0], *words])
    if flags.measure:
        if passed:
            raise UsageError(f"--measure plans nothing; leave {setting(next(iter(passed)))} out")
        if flags.measure.endswith(".json"):
            raise UsageError(f"--measure={flags.measure} would be YAML; use a name that ends in .yaml")
        paths.check_writable("measure", os.path.dirname(flags.measure))
        write_text(flags.measure, hardware.as_yaml(_measured()))
        print(f"[plan] this machine is in {flags.measure}; plan with it by --on={flags.measure}")
        return 0
    paths.check_results({"result_json": passed.get("result_json"), "run_dir": None})
    if flags.plot:
        plot.check(flags.plot)
    if flags.simulate:
        simulation.check()
    machine = hardware.read(flags.on) if flags.on else None
    counts = sorted({int(each) for each in flags.hosts.split(",")})
    for count in counts:  # finds mistakes before TensorFlow starts
        configured(passed, count, machine.devices_per_host if machine else 1)
    machine = machine or _measured()
    if flags.price_per_host_hour:
        machine = dataclasses.replace(machine, price_per_host_hour=flags.price_per_host_hour)
    result = plan(passed, counts, machine, simulates=flags.simulate)
    if flags.plot:
        plot.write(flags.plot, result["hosts"])
    if path := passed.get("result_json"):
        write_json(path, result)
    print(terminal.drawable(report.text(result, machine, terminal.columns()), sys.stdout), flush=True)
    return 0


def _measured() -> Hardware:
    with _tensorflow():
        from .measure import measure
    print("[plan] measuring this machine; nothing else should run meanwhile", flush=True)
    return measure()


@contextlib.contextmanager
def _tensorflow() -> Iterator[None]:
    """Starts TensorFlow, of which modules are imported within."""
    process.prepare(tunes_allocator=False)
    with process.quiet_startup(quiet=True):
        yield


def configured(passed: Mapping[str, Any], hosts: int, devices: int) -> Config:
    """Returns the configuration of a run on a number of hosts, as its chief would have it.

    Args:
      passed: values of train's flags.
      hosts: workers.
      devices: of each.

    Raises:
      UsageError: a flag is wrong, or the strategy can't use so many hosts.
    """
    values = {name: value for name, value in passed.items() if name not in _OF_TASKS}
    servers = passed.get("num_ps", 0)
    alone = "mirrored" if devices > 1 else "one_device"
    strategy = values.setdefault("strategy", "parameter_server" if servers else "multi_worker" if hosts > 1 else alone)
    if strategy in _ON_ONE_HOST and hosts > 1:
        raise UsageError(f"--hosts={hosts}: {setting('strategy', strategy)} runs on one host; use 1, or multi_worker")
    tasks = {"worker": hosts}
    if strategy == "parameter_server":
        if not servers:
            raise UsageError(f"{setting('strategy', strategy)} needs servers; add {setting('num_ps')}=N")
        tasks |= {"chief": 1, "ps": servers}
    ports = itertools.count(_FIRST_PORT)
    cluster = {kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for kind, count in tasks.items()}
    task = {"type": "chief" if servers else "worker", "index": 0}
    config = configs.configure(values, None, False, {tf_config.NAME: json.dumps({"cluster": cluster, "task": task})})
    checks.check_strategy(config)
    return config


def plan(
    passed: Mapping[str, Any], counts: Sequence[int], machine: Hardware, simulates: bool = False
) -> dict[str, Any]:
    """Returns the plan of a run as plain JSON, see `docs/plan.md`. Starts TensorFlow.

    Args:
      passed: values of train's flags.
      counts: numbers of hosts.
      machine: each of them.
      simulates: whether each is simulated too.

    Raises:
      UsageError: a flag is wrong, or the strategy can't use so many hosts.
    """
    planned = [_planned(passed, count, machine) for count in counts]
    advice = []
    if short := next((each for _, each in planned if not each.fits), None):
        advice = [" ".join(map(_word, changes.items())) for changes in _cures(passed, short, machine)]
    config = planned[-1][0]
    entries = [report.entry(each, of.strategy, machine) | _recomputed(passed, each, machine) for of, each in planned]
    if simulates:
        for (of, each), shown in zip(planned, entries, strict=True):
            dues = filter(None, (of.checkpoint_every_steps, of.eval_every_steps, of.summary_every_steps))
            shown["simulated"] = simulation.entry(simulation.scenario(each, machine, min(dues, default=math.inf)))
    return {
        "model": config.model_entry.name,
        "strategy": config.strategy,
        "global_batch_size": config.global_batch_size,
        "hosts": entries,
        "fits": all(each.fits for _, each in planned),
        "advice": advice,
        "constants": dataclasses.asdict(machine),
    }


def _recomputed(passed: Mapping[str, Any], found: Estimate, machine: Hardware) -> dict[str, Any]:
    """Returns the activations with and without --recompute; of a model without blocks that it applies to, the same."""
    changed, of = not passed.get("recompute", False), found.work
    activations = {not changed: of.memory.activations, changed: of.memory.activations}
    with contextlib.suppress(UsageError):
        activations[changed] = _planned({**passed, "recompute": changed}, of.hosts, machine)[1].work.memory.activations
    return {"activations": {"recomputed": activations[True], "kept": activations[False]}}


def _word(change: tuple[str, Any]) -> str:
    name, value = change
    return f"--{name}" if value is True else f"--{name}={value}"


def _planned(passed: Mapping[str, Any], hosts: int, machine: Hardware) -> tuple[Config, Estimate]:
    """Plans for one number of hosts. Raises `UsageError`."""
    with _tensorflow():
        from ..host.isolation import Isolation
        from ..run.base import parallel_micro_batches
        from ..run.run import run_environment
        from .quantify import quantify
    config = configured(passed, hosts, machine.devices_per_host)
    with run_environment(config, Isolation()):
        checks.check_named(config)
        micro_batches = parallel_micro_batches(config) if machine.kind == "cpu" else 1
        work = quantify(config, hosts, machine.devices_per_host, micro_batches)
        operations = 0.0 if config.jit == "on" or machine.kind == "tpu" else work.operations
        return config, estimate(dataclasses.replace(work, operations=operations), machine)


def _cures(passed: Mapping[str, Any], short: Estimate, machine: Hardware) -> Iterator[dict[str, Any]]:
    """Yields changes of flags with which a run fits that does not: of each kind the smallest, or all kinds together."""
    work, memory, limit = short.work, short.work.memory, device_bytes(short.work, machine)
    parts, fixed = passed.get("accumulate_steps", 1), memory.total - memory.activations - memory.data
    smaller: list[dict[str, Any]] = [{"accumulate_steps": factor * parts} for factor in (2, 4, 8, 16, 32)]
    sharded: list[dict[str, Any]] = [{"mesh": f"model:{each}"} for each in (2, 4, 8, 16) if each <= work.replicas]
    kinds: list[list[dict[str, Any]]] = [
        [{"num_ps": factor * work.servers} for factor in (2, 4, 8, 16) if work.servers],
        [{"recompute": True}] if fixed < limit else [],
        smaller if fixed < limit else [],
        [{"shard_optimizer": True}] if memory.total - memory.optimizer < limit else [],
        sharded,
    ]
    together = [{"recompute": True, "shard_optimizer": True} | each for each in smaller]
    together += [{"recompute": True} | each | few for few in (smaller[0], smaller[-1]) for each in sharded]
    fitting = (each for kind in kinds if (each := _first_fitting(passed, kind, work.hosts, machine)))
    first = next(fitting, None) or _first_fitting(passed, together, work.hosts, machine)
    yield from [first] if first else []
    yield from fitting


def _first_fitting(
    passed: Mapping[str, Any], kind: Sequence[dict[str, Any]], hosts: int, machine: Hardware
) -> dict[str, Any] | None:
    """Returns the first of some changes with which the run fits; those that it can't have are left out."""
    for changes in kind:
        with contextlib.suppress(UsageError):
            if _planned({**passed, **changes}, hosts, machine)[1].fits:
                return changes
    return None
