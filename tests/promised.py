"""Prints what docs/versions.md keeps for all of 1.x: names with their arguments, and commands with their flags.

`python -m tests.promised > tests/promised.txt` is for a release: it adds what is new since the last one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

from crankshaft.launch.prepare import PrepareFlags
from crankshaft.parts.ask.command import AskFlags
from crankshaft.parts.dashboard.report import ReportFlags
from crankshaft.parts.dashboard.server import DashboardFlags
from crankshaft.parts.launchers.local import LocalFlags
from crankshaft.parts.plan.main import PlanFlags
from crankshaft.runner.command_line.flags import Flags

COMMANDS = {
    "train": Flags,
    "local": LocalFlags,
    "plan": PlanFlags,
    "prepare": PrepareFlags,
    "ask": AskFlags,
    "monitor": DashboardFlags,
    "report": ReportFlags,
}
MODULES = "crankshaft", "crankshaft.engine.hooks"  # all of their `__all__`
OPTIMIZERS = "SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "Momentum", "RMSprop", "KerasOptimizer", "Optimizer"
OTHERS = (  # which guides use
    *(f"crankshaft.engine.optimizers.{name}" for name in OPTIMIZERS),
    "crankshaft.engine.layers.recomputed",
    "crankshaft.engine.strategies.register",
    "crankshaft.engine.strategies.replicated.Replicated",
    "crankshaft.input.digits.load",
    "crankshaft.models.classification.Classifier",
    "crankshaft.parts.sharding.Dense",
)
EXTENSION_POINTS = (  # which may change in a minor version
    "crankshaft.engine.mesh.layout.Axis",
    "crankshaft.engine.mesh.layout.Mesh",
    "crankshaft.engine.metrics.pairs.Pair",
    "crankshaft.engine.optimizers.FusedOptimizer",
    "crankshaft.engine.reduction.Reduction",
    "crankshaft.engine.strategies.base.Strategy",
    "crankshaft.parts.sharding.Normal",
    "crankshaft.parts.sharding.add_weight",
    "crankshaft.parts.sharding.current_mesh",
    "crankshaft.runner.host.tasks.Tasks",
    "crankshaft.runner.host.tasks.register",
)


def lines() -> list[str]:
    """The promises, a line for each name, argument and flag."""
    names = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    found = []
    for name in (*names, *OTHERS):
        thing = pkgutil.resolve_name(name)
        called = callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception))
        found += [name, *(f"{name}({argument})" for argument in inspect.signature(thing).parameters if called)]
    for command, flags in COMMANDS.items():
        found += [f"crankshaft {command} --{field.name}" for field in dataclasses.fields(flags)]
    return sorted([*found, *(f"extension point {name}" for name in EXTENSION_POINTS)])


if __name__ == "__main__":
    print("\n".join(lines()))
