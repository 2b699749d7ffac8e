"""Crankshaft beside JAX on one device: a jitted scan, and Keras fit on JAX. A script, not a test.

Each measurement is a process of its own; the peers run in turn (A B C A B C ...), and the table has medians. JAX runs
as people write it and in each way that may be faster. Run it from the repository, with a Python that has jax, optax and
keras: `.venv/bin/python -m benchmarks.jax_scan_race --jax_python=.../bin/python --json=jax_scan.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from crankshaft.launch.cluster.resources import usable_cores

from .children import Process
from .markdown import table
from .race import (
    NEEDED,
    PYTHON,
    Race,
    add_arguments,
    check_arguments,
    cpu_model,
    find_facts,
    find_versions,
    quality_table,
    read_result,
    report,
    run_script,
    run_together,
    runs_with,
    write_figures,
)
from .workloads import BATCH_SIZE

PEERS = "benchmarks.peers"
CALL = 50  # steps
# glibc keeps what is freed, as Crankshaft has it do too (launch/host/process.py): the kernel clears no page twice.
ALLOCATOR = (
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=2147483647:glibc.malloc.top_pad=67108864"
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A program in peers/ and its settings. Those of one `kind` are the same program at its best or not."""

    kind: str
    program: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def process(self, python: str, options: list[str]) -> Process:
        return Process([python, "-m", f"{PEERS}.{self.program}", *self.options, *options], dict(self.variables))


_TUNED, _KERAS = (("GLIBC_TUNABLES", ALLOCATOR),), (("KERAS_BACKEND", "jax"),)
_VECTORS = (("XLA_FLAGS", "--xla_cpu_prefer_vector_width=512"),)  # as Crankshaft has them, on CPUs with AVX-512
JAX = {
    "jax_scan": Peer("jax", "jax_scan", (f"--steps_per_call={CALL}",)),
    "jax_scan_allocator": Peer("jax", "jax_scan", (f"--steps_per_call={CALL}",), _TUNED),
    "jax_scan_vectors": Peer("jax", "jax_scan", (f"--steps_per_call={CALL}",), _TUNED + _VECTORS),
    # XLA's loops keep its convolutions to one core, so that one step a call, or steps without a loop, may be faster.
    "jax_unrolled": Peer("jax", "jax_scan", ("--steps_per_call=10", "--unroll=10"), _TUNED),
    "jax_step": Peer("jax", "jax_scan", ("--steps_per_call=1",), _TUNED),
    "keras_jax": Peer("keras", "keras_jax_fit", variables=_KERAS),
    "keras_jax_many_steps": Peer("keras", "keras_jax_fit", (f"--steps_per_call={CALL}",), _KERAS + _TUNED),
}
KINDS = {"jax": "jax_scan", "keras": "keras_jax"}  # and which of each is as people write it
CLOSE = 0.7  # of a kind, those with less of the best one's rate are not measured again
# Steps/s, about, of a first measurement; then its own rate says how many steps it has.
FIRST_GUESS = {"mlp": 1500, "wide": 40, "cnn": 20}
MIN_STEPS = 50


class JaxRace(Race):
    """JAX in its settings, and Crankshaft."""

    def best(self, kind: str) -> str:
        return max((name for name, peer in JAX.items() if peer.kind == kind), key=self.rate)

    def run_round(self, python: str) -> None:
        """Measures each peer once, in turn, but for those that are out of the race."""
        for name, peer in JAX.items():
            compared = name in KINDS.values() or name not in self.measured
            if compared or self.rate(name) >= CLOSE * self.rate(self.best(peer.kind)):
                self.measure_peer(name, python)
        self.measure_crankshaft()

    def measure_peer(self, name: str, python: str) -> None:
        rate = self.rate(name) if name in self.measured else FIRST_GUESS[self.name]
        steps = max(MIN_STEPS, round(rate * self.seconds))
        options = [f"--workload={self.name}", f"--quality_steps={self.quality_steps}"]
        options += [f"--warm_up_steps={max(CALL, steps // 10)}", f"--steps={steps}"]

        def run(folder: Path) -> dict:
            path = folder / "result.json"
            run_together([JAX[name].process(python, [*options, f"--result_json={path}"])])
            return read_result(path)

        self.measure(name, JAX[name].process(python, options).shown(), run)

    def measure_crankshaft(self) -> None:
        flags = [*self.workload.flags, f"--global_batch_size={BATCH_SIZE}", "--progress=off"]
        command = [PYTHON, "-m", "crankshaft", "train", *flags]
        benchmark = ["--mode=benchmark", f"--benchmark_arg=seconds={self.seconds:g}", "--benchmark_arg=rounds=1"]

        def run_flags(folder: Path, *more: str) -> dict:
            path = folder / "result.json"
            run_together([Process([*command, *more, f"--result_json={path}"])])
            return read_result(path)

        def run_quality(folder: Path) -> dict:
            return run_flags(folder, f"--train_steps={self.quality_steps}", f"--run_dir={folder / 'run'}")

        def run(folder: Path) -> dict:
            result = run_flags(folder, *benchmark)
            return result | self.quality("crankshaft", lambda: run_quality(folder))

        self.measure("crankshaft", Process([*command, *benchmark]).shown(), run)


def speed_table(races: list[JaxRace]) -> str:
    """Crankshaft against JAX as written and at its best; which setting that was is told beside the rate."""

    def cells(race: JaxRace) -> list[str]:
        row = []
        for kind, written in KINDS.items():
            best = race.best(kind)
            row += [race.cell(written), f"{race.cell(best)} {best}" if best != written else "as written"]
        return [*row, race.cell("crankshaft")]

    return table(
        [
            "steps/s: median (least–most)",
            "JAX scan of 50",
            "at its best",
            "Keras fit on JAX",
            "at its best",
            "Crankshaft",
        ],
        [[race.workload.title, *cells(race)] for race in races],
    )


def ratio_table(races: list[JaxRace]) -> str:
    def against(race: JaxRace, peer: str) -> str:
        return f"**{race.rate('crankshaft') / race.rate(peer):.2f}x**"

    return table(
        ["Crankshaft against", "JAX scan of 50", "at its best", "Keras fit on JAX", "at its best"],
        [
            [race.workload.title]
            + [against(race, peer) for kind, written in KINDS.items() for peer in (written, race.best(kind))]
            for race in races
        ],
    )


def all_table(races: list[JaxRace]) -> str:
    """Every setting, also those that were measured once and left."""
    return table(
        ["steps/s", *(race.workload.title for race in races)],
        [[f"`{name}`", *(race.cell(name) for race in races)] for name in JAX],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--jax_python", required=True, help="a Python that has jax, optax and keras")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    if arguments.quality_steps % CALL or arguments.quality_steps < 1:
        parser.error(f"--quality_steps={arguments.quality_steps} is not a multiple of {CALL}; use 100")
    if not runs_with(arguments.jax_python, "jax", "optax", *NEEDED):
        parser.error(
            f"--jax_python={arguments.jax_python} does not run `import jax, optax, crankshaft`; pip install "
            "jax optax keras, and pip install --no-deps . here"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    facts = find_facts(arguments) | {"cpu": cpu_model(), "usable_cores": len(usable_cores())}
    races = [JaxRace(name, arguments.seconds, arguments.quality_steps) for name in arguments.workloads]
    for race in races:
        for _ in range(arguments.rounds):
            race.run_round(arguments.jax_python)
    facts["versions"] = find_versions(races)
    note = (
        f"Batch {BATCH_SIZE} of 28x28x1 float32 in memory, Adam; rounds in turn: {facts['rounds']}, "
        f"{facts['seconds']:g} s a measurement, compilation apart. JAX at its best: the fastest of the settings below."
    )
    tables = (speed_table(races), ratio_table(races), all_table(races))
    print(report(races, facts, note, *tables, quality_table(races, arguments.quality_steps)))
    if arguments.json:
        write_figures(arguments.json, facts, races)


if __name__ == "__main__":
    run_script(main)
