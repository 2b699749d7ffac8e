"""Plan a run before paying for it: memory, speed, cost, and how much of its time failures take.

For example:

  crankshaft plan --model=mlp --input=digits --on=a100
  crankshaft plan --model=transformer_lm --input=text --data_dir=books --precision=bfloat16 --on=h100 --hosts=1,8,64
  crankshaft plan --model=mlp --input=digits --on=this.yaml
  crankshaft plan --on=h100 --hosts=8 -- my_script.py --global_batch_size=1024

Besides its own flags it takes those of crankshaft train; after -- a script (or -m and a module) that calls
`crankshaft.main`, and its flags. Nothing is trained, and no weight takes memory: the step is
traced. Without --strategy, the plan is for all devices of the hosts: one_device, mirrored or multi_worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...runner import terminal
from ...runner.command_line import checks, command_flags, configuring, parsing, paths
from ...runner.command_line.rules import Boolean, Number, Text, flag
from ...runner.failures import UsageError
from ...runner.host import process, startup
from ...runner.host.text_files import write_json
from ..clusters import discovery, tf_config
from . import hardware, plan_report, simulation
from .estimate import Estimate, device_bytes, estimate
from .hardware import Hardware
from .scripts import execute

if TYPE_CHECKING:
    from ...engine.data.run_data import Data
    from ...runner.command_line.config import Config

_USAGE = "crankshaft plan [flags] [flags of train] [-- [script.py | -m module] [flags of train]]"
_MOST_HOSTS = 50_000
_FIRST_PORT = 10_000
_ON_ONE_HOST = ("one_device", "mirrored", "tpu")
# The flags of a run's tasks and files, without effect on a plan.
_WITHOUT_EFFECT = ("cluster_hosts", "task_index", "bind", "num_ps", "evaluator", "run_dir", "result_json")


def _check_hosts(text: str) -> None:
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_HOSTS for part in text.split(",")):
        raise ValueError(f"it is not a list of numbers from 1 to {_MOST_HOSTS:,}, such as 1,8,64")


@dataclasses.dataclass(kw_only=True)
class PlanFlags:
    """The values of a command line, without those of the run."""

    on: str | None = flag(
        Text("a name or a path"),
        None,
        "Hardware: h100, a100, l4, tpu-v5e, or a YAML or JSON file.",
    )
    hosts: str = flag(Text("numbers, e.g. 1,8,64", _check_hosts), "1", "Numbers of hosts to plan for.")
    simulate: bool = flag(Boolean(), False, "Simulate each number of hosts for 30 days: failures and jitter.")
    price_per_host_hour: float | None = flag(
        Number(above=0, upper=1e9), None, "Price of a host per hour, in any currency."
    )


def main(argv: list[str]) -> int:
    """Plans by the command line."""
    cut = argv.index("--") if "--" in argv else len(argv)
    flags, words = command_flags.read(argv[:cut], PlanFlags, _USAGE, takes_others=True)
    program, arguments = command_flags.split_program(argv[cut + 1 :]) if argv[cut + 1 :] else ((), [])
    words += arguments
    if program:
        command_flags.check_script_exists(program)
        with _tensorflow():
            import_module("tensorflow")  # without the notes that it prints where the script imports it
        execute(program, words, functools.partial(_plan, flags))
    return _plan(flags, parsing.from_argv([argv[0], *words]))


def _plan(flags: PlanFlags, given: dict[str, Any], trainer_class=None, data=None) -> int:
    """Prints the plan of a run with these flags, and with a script's trainer and data; returns the exit code."""
    paths.check_results({"result_json": given.get("result_json"), "run_dir": None})
    if flags.simulate:
        simulation.import_simpy()  # before TensorFlow starts, if it is missing
    if not flags.on:
        raise UsageError("--on is missing; give h100, a100, l4, tpu-v5e, or a file as docs/plan.md shows one")
    machine = hardware.read(flags.on)
    counts = sorted({int(count) for count in flags.hosts.split(",")})
    for count in counts:  # finds mistakes before TensorFlow starts
        configured(given, count, machine.devices_per_host, trainer_class, data is not None)
    if flags.price_per_host_hour:
        machine = dataclasses.replace(machine, price_per_host_hour=flags.price_per_host_hour)
    result = plan(given, counts, machine, flags.simulate, trainer_class, data)
    if path := given.get("result_json"):
        write_json(path, result)
    print(plan_report.text(result, machine, terminal.columns()), flush=True)
    return 0


@contextlib.contextmanager
def _tensorflow() -> Iterator[None]:
    """Starts TensorFlow, of which modules are imported within."""
    process.prepare(tunes_allocator=False)
    with startup.quiet_startup(quiet=True):
        yield


def configured(
    given: Mapping[str, Any], hosts: int, devices: int, trainer_class: type | None = None, has_data: bool = False
) -> Config:
    """Configures a run on a number of hosts, as its chief would.

    Args:
      given: values of train's flags, by name.
      devices: number of devices of each host.
      trainer_class: Trainer of a script; None where --model names one.
      has_data: whether a script brings its data.

    Raises:
      UsageError: a flag is wrong, or the strategy can't use so many hosts, or has parameter servers.
    """
    values = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    alone = "mirrored" if devices > 1 else "one_device"
    strategy = values.setdefault("strategy", "multi_worker" if hosts > 1 else alone)
    if given.get("num_ps") or strategy == "parameter_server":
        words = ", ".join(f"{name}={given[name]}" for name in ("strategy", "num_ps") if given.get(name))
        raise UsageError(f"{words}: parameter servers are not planned; leave that out to plan synchronous workers")
    if strategy in _ON_ONE_HOST and hosts > 1:
        raise UsageError(f"--hosts={hosts}: strategy={strategy} runs on one host; use 1, or multi_worker")
    # As the first of so many tasks would be configured; nothing is started at the addresses.
    cluster = {"worker": [f"127.0.0.1:{_FIRST_PORT + index}" for index in range(hosts)]}
    environment = {tf_config.NAME: json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    config = configuring.configure(
        values, trainer_class, has_data, environment, discovery=discovery, to_trainer=_to_trainer
    )
    checks.check_placement(config)
    return config


def _to_trainer(module: ModuleType) -> type | None:
    from ..keras_models.keras_trainer import KerasTrainer

    return KerasTrainer.for_module(module)


def plan(
    given: Mapping[str, Any],
    counts: Sequence[int],
    machine: Hardware,
    simulates: bool = False,
    trainer_class: type | None = None,
    data: Callable | Sequence | None = None,
) -> dict[str, Any]:
    """Plans a run as plain JSON, see `docs/plan.md`. Starts TensorFlow.

    Args:
      given: values of train's flags, by name.
      trainer_class, data: as `crankshaft.main` takes them, of a script.

    Raises:
      UsageError: a flag is wrong, or the strategy can't use so many hosts.
    """
    plans = _Plans(given, machine, trainer_class, data)
    planned = [plans.estimate(count) for count in counts]
    short = next((found for _, found in planned if not found.fits), None)
    entries = []
    for config, found in planned:
        entry = plan_report.entry(found, config.strategy, machine)
        # With and without recomputation; the same for a model without blocks that it applies to.
        activations = dict.fromkeys((True, False), found.work.memory.activations)
        with contextlib.suppress(UsageError):
            other = plans.estimate(found.work.hosts, recompute=not config.recompute)[1]
            activations[not config.recompute] = other.work.memory.activations
        entry["activations"] = {"recomputed": activations[True], "kept": activations[False]}
        if simulates:
            entry["simulated"] = simulation.entry(simulation.scenario(found, machine))
        entries.append(entry)
    config = planned[-1][0]
    advice = [
        " ".join(f"--{name}" if value is True else f"--{name}={value}" for name, value in changes.items())
        for changes in (_fixes(plans, short) if short else ())
    ]
    return {
        "model": config.model_entry.name,
        "strategy": config.strategy,
        "global_batch_size": config.global_batch_size,
        "jit": config.jit if any(found.work.can_jit for _, found in planned) else "off",
        "hosts": entries,
        "fits": short is None,
        "advice": advice,
        "constants": dataclasses.asdict(machine),
    }


class _Plans:
    """Estimates a run with some flags changed; loads its data once."""

    def __init__(self, given: Mapping[str, Any], machine: Hardware, trainer_class: type | None, data):
        self.given, self.machine = given, machine
        self._trainer_class, self._given_data = trainer_class, data
        self._estimates: dict[tuple, tuple[Config, Estimate]] = {}
        self._data: Data | None = None

    def estimate(self, hosts: int, **changes: Any) -> tuple[Config, Estimate]:
        """Estimates the run on a number of hosts. Raises `UsageError`."""
        if (key := (hosts, *changes.items())) in self._estimates:
            return self._estimates[key]
        given, data, devices = {**self.given, **changes}, self._given_data, self.machine.devices_per_host
        config = configured(given, hosts, devices, self._trainer_class, data is not None)
        with _tensorflow():
            from ...runner.data import loading
            from ...runner.host.isolation import Isolation
            from .quantify import quantify
        with Isolation(config.keras_defaults, check_numerics=config.check_numerics).entered():
            checks.check_named(config)
            self._data = self._data or (loading.load(config) if config.input else loading.data_from(data))
            work = quantify(config, hosts, devices, self.machine.kind, self._data)
        if config.jit == "on" or self.machine.kind == "tpu":
            work = dataclasses.replace(work, operations=0.0)  # XLA makes one program of them
        seconds = None if config.snapshot_seconds == "auto" else float(config.snapshot_seconds)
        self._estimates[key] = config, estimate(work, self.machine, seconds)
        return self._estimates[key]

    def first_fitting(self, hosts: int, changes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Finds the first of some changes with which the run fits; those that it can't have are left out."""
        for change in changes:
            with contextlib.suppress(UsageError):
                if self.estimate(hosts, **change)[1].fits:
                    return change
        return None


def _fixes(plans: _Plans, short: Estimate) -> Iterator[dict[str, Any]]:
    """Yields changes of flags with which a run fits that does not: of each kind the smallest, or all kinds together."""
    work, memory, limit = short.work, short.work.memory, device_bytes(short.work, plans.machine)
    # Recomputation and micro-batches reduce activations alone.
    parts, fixed = plans.given.get("accumulate_steps", 1), memory.total - memory.activations - memory.data
    smaller: list[dict[str, Any]] = [{"accumulate_steps": factor * parts} for factor in (2, 4, 8, 16, 32)]
    sharded: list[dict[str, Any]] = [{"mesh": f"model:{size}"} for size in (2, 4, 8, 16) if size <= work.replicas]
    kinds: list[list[dict[str, Any]]] = [
        [{"recompute": True}] if fixed < limit else [],
        smaller if fixed < limit else [],
        [{"shard_optimizer": True}] if memory.total - memory.optimizer < limit else [],
        sharded,
    ]
    together = [{"recompute": True, "shard_optimizer": True} | change for change in smaller]
    together += [{"recompute": True} | change | few for few in (smaller[0], smaller[-1]) for change in sharded]
    fitting = [change for kind in kinds if (change := plans.first_fitting(work.hosts, kind))]
    yield from fitting or filter(None, [plans.first_fitting(work.hosts, together)])
