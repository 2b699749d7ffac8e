"""Crankshaft's parameter servers beside TensorFlow's tutorial, tables by size, bytes on the wire: a script, not a test.

Two workers and two servers (or one), a process each, share this machine's cores. What is compared runs in turn (A B A B
...), and the tables have medians. Run it from the repository, on a machine where nothing else uses the loopback:
`.venv/bin/python -m benchmarks.parameter_server --json=parameter_server.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from crankshaft.engine.machine import memory
from crankshaft.input import synthetic_clicks
from crankshaft.launch.cluster.resources import free_ports, usable_cores

from .children import Process
from .markdown import spread, table
from .multi_worker import WorkersRace
from .race import (
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
    write_figures,
)
from .workloads import BATCH_SIZE

WORKERS = SERVERS = 2
PARTS = ("speed", "tables", "bytes")
WORKLOADS = ("mlp", "wide_deep")
TUTORIAL = "-m", "benchmarks.peers.ps_tutorial_loop"
TABLE = "-m", "benchmarks.peers.ps_table"
# How many servers a table is on, by what the report calls it.
PLACES = {"1 server": 1, "2 servers": 2}
# Steps/s, about: how many steps a first measurement has. Then its own rate says.
FIRST_GUESS = {"tutorial": 150, "crankshaft": 500, **dict.fromkeys(PLACES, 100)}
MIN_STEPS = 50

WIDTH = 16  # numbers in a row
FIELDS = 8  # ids in an example
ID_BYTES, NUMBER_BYTES = 8, 4
SLOTS = {"sgd": 0, "adagrad": 1}  # as large as the table, beside it
SPARE_BYTES = 5 << 30  # for TensorFlow, some 0.6 GiB a process, and for what else the machine does
TABLE_BATCH = 1024
TABLE_EXAMPLES = 1_000_000  # so many that a measurement does not come to the same rows again and again
SAMPLED_BATCHES = 50

BYTES_ROWS = 100_000
BYTES_EXAMPLES = 50_000
BYTES_BATCHES = (64, 1024)
BYTES_STEPS = (200, 1000)  # of two runs: by what they differ is what steps cost, without the start
LOOKUPS = {"each id": "unique_first=false", "unique first": "unique_first=true"}


# -- A cluster's processes --------------------------------------------------------------------------------------------


def tutorial_cluster(options: Sequence[str]) -> list[Process]:
    """The coordinator, workers and servers of the tutorial's loop."""
    kinds = ["chief", *["worker"] * WORKERS, *["ps"] * SERVERS]
    cluster: dict[str, list[str]] = {}
    for kind, port in zip(kinds, free_ports(len(kinds)), strict=True):
        cluster.setdefault(kind, []).append(f"localhost:{port}")
    return [
        Process([PYTHON, TUTORIAL, *options], _variables(cluster, kind, index), serves=kind != "chief")
        for kind, addresses in cluster.items()
        for index in range(len(addresses))
    ]


def _variables(cluster: dict[str, list[str]], kind: str, index: int) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config), "GRPC_FAIL_FAST": "use_caller"}


def crankshaft(*flags: str, servers: int = SERVERS) -> list[str]:
    """The command of a cluster of Crankshaft's."""
    return [
        PYTHON,
        "-m",
        "crankshaft",
        "local",
        f"--workers={WORKERS}",
        f"--ps={servers}",
        "--",
        *flags,
        "--progress=off",
    ]


def timed(steps: int) -> list[str]:
    return ["--mode=benchmark", f"--benchmark_arg=steps={steps}", "--benchmark_arg=rounds=1"]


def run_cluster(command: Sequence[str], folder: Path) -> dict:
    path = folder / "result.json"
    run_together([Process([*command, f"--result_json={path}"])])
    return read_result(path)


def enough_steps(race: Race, peer: str) -> int:
    """As many as take about the seconds that a measurement has."""
    rate = race.rate(peer) if peer in race.measured else FIRST_GUESS[peer]
    return max(MIN_STEPS, round(rate * race.seconds))


# -- Speed ------------------------------------------------------------------------------------------------------------


class ServersRace(WorkersRace):
    """The tutorial's loop, and Crankshaft."""

    def run_round(self) -> None:
        """Measures each once, in turn."""
        self.measure_peer("tutorial", tutorial_cluster)
        self.measure_crankshaft("crankshaft")

    def steps(self, peer: str) -> int:
        return enough_steps(self, peer)

    def measure_crankshaft(self, peer: str) -> None:
        job = crankshaft(*self.workload.flags, f"--global_batch_size={BATCH_SIZE}")
        command = [*job, *timed(self.steps(peer))]

        def run_quality(folder: Path) -> dict:
            steps = f"--train_steps={self.quality_steps}"
            return run_cluster([*job, "--mode=train_and_eval", steps, f"--run_dir={folder / 'run'}"], folder)

        def run(folder: Path) -> dict:
            return run_cluster(command, folder) | self.quality(peer, lambda: run_quality(folder))

        self.measure(peer, Process(command).shown(), run)


def speed_table(races: Sequence[ServersRace]) -> str:
    def ratio(race):
        return f"**{race.rate('crankshaft') / race.rate('tutorial'):.2f}x**"

    return table(
        ["steps/s: median (least–most)", "tutorial's loop", "Crankshaft", "against the tutorial's loop"],
        [[race.workload.title, race.cell("tutorial"), race.cell("crankshaft"), ratio(race)] for race in races],
    )


# -- Tables by size ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Clicks:
    """What a table is asked for: ids of `synthetic_clicks`, `FIELDS` an example; and what updates it."""

    rows: int
    batch: int
    examples: int
    exponent: float
    optimizer: str

    @property
    def arguments(self) -> dict:
        """Of `synthetic_clicks.load`: each field has its part of the rows."""
        return {"fields": FIELDS, "rows": self.rows // FIELDS, "exponent": self.exponent, "eval_examples": 1}

    @property
    def flags(self) -> list[str]:
        arguments = self.arguments | {"examples": self.examples}
        return [
            "--input=synthetic_clicks",
            *(f"--input_arg={name}={value}" for name, value in arguments.items()),
            f"--global_batch_size={self.batch}",
            f"--optimizer={self.optimizer}",
        ]

    def distinct(self) -> float:
        """How many different ids a batch has, on average. Examples are sampled alike, so any batches will do."""
        features, _ = synthetic_clicks.load(None, 0, examples=SAMPLED_BATCHES * self.batch, **self.arguments).train
        ids = features["categories"] * FIELDS + np.arange(FIELDS)  # a field's are its own
        return statistics.mean(len(np.unique(batch)) for batch in ids.reshape(SAMPLED_BATCHES, -1))

    @property
    def table_bytes(self) -> int:
        """With slots."""
        return self.rows * WIDTH * NUMBER_BYTES * (1 + SLOTS[self.optimizer])


@dataclasses.dataclass
class TableRace(Race):
    """One table, whose rows are asked for evenly, on one server and on two."""

    clicks: Clicks | None = None

    def run_round(self) -> None:
        for peer, servers in PLACES.items():
            command = crankshaft(TABLE, *self.clicks.flags, *timed(enough_steps(self, peer)), servers=servers)
            self.measure(peer, Process(command).shown(), lambda folder, command=command: self.run(command, folder))

    def run(self, command: list[str], folder: Path) -> dict:
        result = run_cluster(command, folder)
        return result | {"rows_per_sec": result["steps_per_sec"] * self.clicks.distinct()}

    def row_rates(self, peer: str) -> list[float]:
        return [measurement["rows_per_sec"] for measurement in self.measured[peer]]


def table_races(arguments: argparse.Namespace) -> Iterator[TableRace]:
    """Those whose tables fit into memory."""
    for millions in arguments.table_rows:
        clicks = Clicks(millions * 1_000_000, TABLE_BATCH, TABLE_EXAMPLES, 0.0, arguments.table_optimizer)
        # A slot is filled from a tensor of its size.
        needed, available = 3 * clicks.table_bytes // 2 + SPARE_BYTES, memory.available_bytes()
        if needed > available:
            print(f"{millions}M rows left out: {needed:,} bytes needed, {available:,} available", file=sys.stderr)
        else:
            yield TableRace(f"{millions}M", arguments.seconds, arguments.quality_steps, clicks=clicks)


def size_table(races: Sequence[TableRace]) -> str:
    """Rows a second, and the share that it is of the smallest table's."""

    def cell(race, peer):
        rate, smallest = (statistics.median(each.row_rates(peer)) for each in (race, races[0]))
        return f"{spread(race.row_rates(peer))}: **{rate / smallest:.0%}**"

    return table(
        ["rows/s looked up and updated: share of the smallest table's", "bytes, with slots", *PLACES],
        [
            [f"{race.clicks.rows:,} x {WIDTH}", f"{race.clicks.table_bytes:,}", *(cell(race, peer) for peer in PLACES)]
            for race in races
        ],
    )


# -- Bytes on the wire ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class BytesRace(Race):
    """A table whose ids follow a power law: each id looked up by itself, and each different one once."""

    clicks: Clicks | None = None

    def run_round(self) -> None:
        for peer, argument in LOOKUPS.items():
            job = crankshaft(TABLE, f"--model_arg={argument}", *self.clicks.flags)
            shown = Process([*job, *timed(BYTES_STEPS[-1])]).shown()
            self.measure(peer, shown, lambda folder, job=job: self.run(job, folder))

    def run(self, job: list[str], folder: Path) -> dict:
        sent, steps = [], []
        for number in BYTES_STEPS:
            before = loopback_bytes()
            result = run_cluster([*job, *timed(number)], folder)
            sent.append(loopback_bytes() - before)
            steps.append(result["step"])  # those of the warm-up too
        return result | {"bytes_per_step": (sent[1] - sent[0]) / (steps[1] - steps[0])}

    def sent(self, peer: str) -> float:
        """Bytes a step, median of what was measured."""
        return statistics.median(measurement["bytes_per_step"] for measurement in self.measured[peer])


def loopback_bytes() -> int:
    """Received by the loopback until now, with headers, by any process."""
    return int(re.search(r"\blo:\s*(\d+)", Path("/proc/net/dev").read_text(encoding="ascii"))[1])


def computed_bytes(ids: float) -> float:
    """Of ids on their way there and their rows on the way back: a lookup."""
    return ids * (ID_BYTES + NUMBER_BYTES * WIDTH)


def bytes_table(races: Sequence[BytesRace]) -> str:
    def row(race):
        ids, distinct = race.clicks.batch * FIELDS, race.clicks.distinct()
        looked_up = computed_bytes(ids), computed_bytes(distinct)
        measured = [race.sent(peer) for peer in LOOKUPS]
        cells = [f"{race.clicks.batch}", f"{ids:,}", f"{distinct:,.0f}"]
        cells += [f"{value:,.0f}" for value in looked_up] + [f"**{looked_up[0] / looked_up[1]:.2f}x**"]
        # The update sends each different row once in both, and which they are, unless the lookup has told it already.
        rows = distinct * NUMBER_BYTES * WIDTH
        updated = {"each id": rows + distinct * ID_BYTES, "unique first": rows}
        cells += [f"{value + updated[peer]:,.0f}" for value, peer in zip(looked_up, LOOKUPS, strict=True)]
        return [*cells, *(f"{value:,.0f}" for value in measured), f"**{measured[0] / measured[1]:.2f}x**"]

    kinds = [f"{kind}, {peer}" for kind in ("lookup", "step", "measured step") for peer in LOOKUPS]
    header = ["bytes: batch", "ids", "different ids", *kinds[:2], "ratio", *kinds[2:], "ratio"]
    return table(header, [row(race) for race in races])


# -- The command line -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, WORKLOADS)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--table_rows", default="1,10,50", help="millions of rows of the tables (%(default)s)")
    parser.add_argument("--table_optimizer", choices=SLOTS, default="sgd", help="what updates them (%(default)s)")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))} is unknown; use some of {', '.join(PARTS)}")
    try:
        arguments.table_rows = sorted(int(millions) for millions in arguments.table_rows.split(","))
    except ValueError:
        parser.error(f"--table_rows={arguments.table_rows} are not whole millions; use e.g. 1,10")
    return arguments


def bytes_races(arguments: argparse.Namespace) -> Iterator[BytesRace]:
    for batch in BYTES_BATCHES:
        exponent = synthetic_clicks.load.__kwdefaults__["exponent"]
        clicks = Clicks(BYTES_ROWS, batch, BYTES_EXAMPLES, exponent, arguments.table_optimizer)
        yield BytesRace(f"b{batch}", arguments.seconds, arguments.quality_steps, clicks=clicks)


def main() -> None:
    arguments = parse_arguments()
    facts = find_facts(arguments) | {"cpu": cpu_model(), "usable_cores": len(usable_cores())}
    speed = [ServersRace(name, arguments.seconds, arguments.quality_steps) for name in arguments.workloads]
    parts = {
        "speed": (speed, speed_table),
        "tables": (list(table_races(arguments)), size_table),
        "bytes": (list(bytes_races(arguments)), bytes_table),
    }
    chosen = {part: parts[part] for part in PARTS if part in arguments.parts}
    for part, (races, _) in chosen.items():
        for _ in range(1 if part == "bytes" else arguments.rounds):  # a count does not drift
            for race in races:
                race.run_round()
    every = [race for races, _ in chosen.values() for race in races]
    facts["versions"] = find_versions(every)
    note = (
        f"{WORKERS} workers and {SERVERS} servers on one machine; rounds in turn: {facts['rounds']}, "
        f"{facts['seconds']:g} s a measurement, compilation apart. Speed: batch {BATCH_SIZE} an update, Adam. Tables: "
        f"{arguments.table_optimizer}, batch {TABLE_BATCH} of {FIELDS} ids, sampled evenly. Bytes: a table of "
        f"{BYTES_ROWS:,} x {WIDTH}, ids of a power law; computed, and as the loopback counted them once, with headers."
    )
    tables = [show(races) for races, show in chosen.values() if races]
    if "speed" in chosen:
        tables.append(quality_table(speed, arguments.quality_steps))
    print(report(every, facts, note, *tables))
    if arguments.json:
        write_figures(arguments.json, facts, every)


if __name__ == "__main__":
    run_script(main)
