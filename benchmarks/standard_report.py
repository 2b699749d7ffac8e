"""Reports the standard set's results, as Markdown and as JSON. Host code, no TensorFlow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .keras_peer import SETTINGS, STEPS_PER_EXECUTION
from .markdown import number, spread, table
from .suite import BATCH_SIZE, OURS, Row, Suite

_NONE = "–"


def environment_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the machine as our first measurement on one device found it: a cluster's processes see a share of it."""
    environments = [result["environment"] for row in rows for result in row.measured.get(OURS, [])]
    return max(environments, key=lambda each: each.get("usable_cores") or 0, default={})


def markdown(suite: Suite, facts: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    """Returns the whole report.

    Args:
      suite: measured.
      facts: date, command, load_before, and `stopped`, why it is not whole, or None.
      left_out: strategies that this machine can't run, and why.
    """
    environment = environment_of(suite.rows)
    parts = [
        f"# Crankshaft's standard benchmarks, {facts['date'][:10]}",
        _machine(environment, facts),
        _note(suite),
        _speed_table(suite.rows),
        _list("Not measured:", [*_left_out(suite.rows, left_out), *([facts["stopped"]] if facts["stopped"] else [])]),
        _quality_table(suite),
        _commands(suite.rows, facts["command"]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _machine(environment: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    versions = [f"{name} {version}" for name, version in (environment.get("versions") or {}).items() if version]
    cores = environment.get("usable_cores")
    machine = [environment.get("cpu") or "unknown CPU", *([f"{cores:g} cores"] if cores else [])]
    return ", ".join([facts["date"], *machine, f"load before {facts['load_before']}"]) + f"; {', '.join(versions)}."


def _note(suite: Suite) -> str:
    return (
        f"Steps a second, compilation apart; Adam, data in memory, batch {BATCH_SIZE} a replica (on parameter servers "
        f"an update's). Rounds in turn: {suite.rounds}, {suite.seconds:g} s a measurement, each in a process of its "
        f"own; median (least–most). Keras fit as people write it; at best: {STEPS_PER_EXECUTION} steps a call and "
        "the faster of XLA and not (of convolutions on a CPU without, where XLA takes minutes for a few steps); in the "
        "same precision, on one device."
    )


def _speed_table(rows: Sequence[Row]) -> str:
    header = ["workload", "strategy", "replicas", "Keras fit", "fit at its best", "Crankshaft"]
    return table([*header, "examples/s", "against fit", "at its best"], [_speed(row) for row in rows], 2)


def _speed(row: Row) -> list[str]:
    best = row.best_keras()
    xla = {"fit_tuned_xla": " with XLA", "fit_tuned": " without XLA"}
    examples = [result["examples_per_sec"] for result in row.measured.get(OURS, [])]
    title = row.workload.title if row.precision == "float32" else f"{row.workload.title}, {row.precision}"
    return [
        title,
        row.setup.strategy,
        str(row.setup.replicas),
        _cell(row, "fit"),
        _cell(row, best) + xla[best] if best else _NONE,
        _cell(row, OURS),
        number(statistics.median(examples)) if examples else _NONE,
        _ratio(row, "fit"),
        _ratio(row, best) if best else _NONE,
    ]


def _cell(row: Row, peer: str) -> str:
    return "failed" if peer in row.failed and not row.rates(peer) else spread(row.rates(peer))


def _ratio(row: Row, peer: str) -> str:
    ours, theirs = row.rate(OURS), row.rate(peer)
    return f"**{ours / theirs:.2f}x**" if ours and theirs else _NONE


def _left_out(rows: Sequence[Row], left_out: Mapping[str, str]) -> list[str]:
    failed = [f"{row.title} {peer}: {why}" for row in rows for peer, why in row.failed.items()]
    return [*(f"{strategy}: {why}" for strategy, why in left_out.items()), *failed]


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)]) if lines else ""


def _quality_table(suite: Suite) -> str:
    rows = [line for row in suite.rows if "quality" in row.measured for line in _quality(row)]
    return (
        table([f"after {suite.quality_steps} steps", "", "evaluation loss", "accuracy or AUC"], rows, 2) if rows else ""
    )


def _quality(row: Row) -> list[list[str]]:
    results = {peer: row.measured[peer][0] for peer in SETTINGS if peer in row.measured}
    results[OURS] = row.measured["quality"][0]["eval"]
    title, metric = f"{row.workload.title}, {row.precision}", row.workload.metric
    return [[title, peer, _decimals(each["loss"]), _decimals(each[metric])] for peer, each in results.items()]


def _decimals(value: float | None) -> str:
    """Formats four decimals; a dash for what was not finite."""
    return "–" if value is None else f"{value:.4f}"


def _commands(rows: Sequence[Row], command: str) -> str:
    lines = dict.fromkeys(line for row in rows for line in row.commands.values())
    return "\n".join(["```", command, "", "# each measurement, in a process of its own:", *lines, "```"])


def figures(suite: Suite, facts: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Returns everything that was measured. Plain JSON."""
    return {
        **facts,
        "rounds": suite.rounds,
        "seconds": suite.seconds,
        "environment": environment_of(suite.rows),
        "left_out": dict(left_out),
        "rows": [
            {
                "workload": row.name,
                "strategy": row.setup.strategy,
                "replicas": row.setup.replicas,
                "precision": row.precision,
                "measured": row.measured,
                "failed": row.failed,
                "commands": row.commands,
            }
            for row in suite.rows
        ],
    }
