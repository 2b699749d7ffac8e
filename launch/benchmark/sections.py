"""A benchmark's result for people: sections of named figures, in words. Host code.

The terminal's table and `crankshaft report` show the same sections; a figure that is missing leaves its row out, a
section without rows is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Shares of a step, by their keys.
PART_NAMES = {
    "step": "forward, backward",
    "model_sums": "sums over model",
    "input": "input",
    "reduce": "reduction",
    "update": "update",
}


class Section(NamedTuple):
    """Rows of text under one title.

    Attributes:
      title: also its name.
      columns: the rows' columns by name, of which the first names the row; () where each row is (name, value).
      rows: of as many texts as there are columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def figures(self) -> list[bool]:
        """For each of `columns`, whether it holds figures, which are aligned right."""
        columns = zip(*self.rows, strict=True) if self.columns else ()
        return [all(cell[:1].isdigit() or cell[:1] in "–-" for cell in column) for column in columns]


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Returns all sections of a result (what --result_json holds), in the order of reading."""
    made = [
        Section("Run", (), _run(result)),
        Section("Rate", (), _rate(result)),
        Section("Step", (), _step(result)),
        Section("Rounds", ("round", "steps", "seconds", "steps/s", "examples/s"), _rounds(result)),
        Section("Limits", (), _limits(result)),
        Section("Parts", ("part", "ms/step", "share"), _parts(result)),
        Section("Reduction", ("dtype", "packs", "ms/step", "GB/s", "bus GB/s"), _reduction(result)),
        Section("Checkpoint", (), _checkpoint((result.get("parts") or {}).get("checkpoint") or {})),
        Section("Profile", ("op", "type", "ms/step", "share"), _profile(result)),
        Section("Baseline", (), _baseline(result)),
        Section("Pairs", ("pair", "this one", "baseline", "ratio"), _pairs(result)),
        Section("Machine", (), _machine(result.get("environment") or {}, result.get("noise") or {})),
        Section("Warnings", (), [("!", warning) for warning in result.get("warnings") or ()]),
    ]
    return [section for section in made if section.rows]


def number(value: float | None) -> str:
    """Formats four significant digits, thousands apart; a dash where there is no figure."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """Formats a share of 0 to 1."""
    return "–" if value is None else f"{value:.1%}"


def between(interval: Sequence[float] | None) -> str:
    """Formats an interval's two ends."""
    return "–" if interval is None else f"{number(interval[0])} – {number(interval[1])}"


def quantity(value: float | None, unit: str) -> str:
    """Formats a quantity with the prefix that leaves one to three digits before the point: 2.35 GFLOP."""
    if value is None:
        return "–"
    prefixes = ["", "k", "M", "G", "T", "P"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}"


def bound(roofline: Mapping[str, Any]) -> str:
    """Names what sets the limit: compute, memory, or the last cache where that holds all that a step touches."""
    in_cache = roofline.get("bound") == "memory" and roofline.get("bandwidth") == "cache"
    return "the last cache" if in_cache else str(roofline.get("bound"))


def _rows(result: Mapping[str, Any], *forms: tuple[str, str, Callable[[Any], str]]) -> list[tuple[str, str]]:
    """Returns (title, text) of each (title, key, form) whose key has a value."""
    return [(title, form(result[key])) for title, key, form in forms if result.get(key) is not None]


def _run(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = _rows(
        result,
        ("model", "model", str),
        ("input", "input", str),
        ("strategy", "strategy", str),
        ("part", "parts", lambda parts: "all" if "shares" in parts else f"{', '.join(parts)} alone"),
        ("replicas", "num_replicas", str),
        ("global batch", "global_batch_size", number),
        ("precision", "precision", str),
        ("XLA", "jit", lambda on: "on" if on else "off"),
    )
    if result.get("steps") and result.get("wall_seconds"):
        rows.append(("timed", f"{result['steps']:,} steps in {result['wall_seconds']:.2f} s"))
    return [*rows, *_rows(result, ("warm-up", "compile_seconds", "{:.1f} s, compilation included".format))]


def _rate(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = _rows(result, ("steps/s", "steps_per_sec", number), ("examples/s", "examples_per_sec", number))
    rows += _rows(result, ("  95 % interval", "interval", between))
    if result.get("mean") is not None:
        error = "" if result.get("stderr") is None else f" ± {number(result['stderr'])}"
        rows.append(("  mean over calls", f"{number(result['mean'])}{error}, jitter {number(result.get('jitter'))}"))
    return rows


def _step(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if result.get("step_ms"):
        quantiles = ", ".join(f"{name} {number(value)}" for name, value in result["step_ms"].items())
        rows.append(("step ms", quantiles))
    rows += _rows(
        result,
        ("first step", "first_step_seconds", "{:.2f} s".format),
        ("input wait", "input_wait_fraction", "{:.1%} of the time".format),
        ("reduction", "reduce_fraction", "{:.1%} of the time".format),
        ("peak memory", "peak_rss_mb", "{:,.0f} MiB".format),
        ("device peak", "device_peak_mb", "{:,.0f} MiB".format),
    )
    if result.get("train"):
        rows.append(("train", ", ".join(f"{name} {number(value)}" for name, value in result["train"].items())))
    return rows


def _rounds(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = result.get("rounds") or ()
    if len(found) < 2:  # the totals say it
        return []
    return [
        (
            str(i),
            number(each.get("steps")),
            f"{each['wall_seconds']:.2f}",
            number(each.get("steps_per_sec")),
            number(each.get("examples_per_sec")),
        )
        for i, each in enumerate(found, 1)
    ]


def _limits(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if result.get("flops_per_step") is not None:
        source = f": {result['flops_source']}" if result.get("flops_source") else ""
        rows.append(("a step", f"{quantity(result['flops_per_step'], 'FLOP')}{source}"))
    rows += _rows(result, ("  moves at least", "bytes_per_step", lambda bytes: quantity(bytes, "B")))
    machine = result.get("machine") or {}
    for dtype, rate in (machine.get("matmul_gflops") or {}).items():
        rows.append((f"peak {dtype}", quantity(rate and 1e9 * rate, "FLOP/s")))
    rows += _rows(
        machine,
        ("memory", "memory_gb_per_sec", lambda rate: quantity(1e9 * rate, "B/s")),
        ("last cache", "cache_gb_per_sec", lambda rate: quantity(1e9 * rate, "B/s")),
    )
    roofline = result.get("roofline") or {}
    if roofline.get("bound"):
        limit = number(roofline.get("limit_steps_per_sec"))
        rows.append(("bound by", f"{bound(roofline)}: at most {limit} steps/s"))
    return rows + _rows(roofline, ("share of limit", "share_of_limit", percent))


def _parts(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lists the parts of a step's time, as far as they explain it; or a part that was timed by itself."""
    parts = dict(result.get("parts") or {})
    shares, whole = parts.pop("shares", None), (parts.get("whole") or {}).get("ms_per_step")
    if shares and whole:
        taken = {name: share for name, share in shares.items() if share}  # one replica has no sum over replicas
        rows = [(PART_NAMES.get(name, name), number(share * whole), percent(share)) for name, share in taken.items()]
        return [("whole", number(whole), percent(1.0)), *rows]
    timed = {name: part["ms_per_step"] for name, part in parts.items() if part and part.get("ms_per_step") is not None}
    return [(f"{name} alone", number(ms), "–") for name, ms in timed.items()]


def _reduction(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lists the sum over replicas alone: as the run makes it, in other dtypes and packs, and of four bytes."""
    reduce = (result.get("parts") or {}).get("reduce") or {}
    own = [{"dtype": "as in this run", **reduce}] if reduce.get("gb_per_sec") is not None else []
    rows = [
        (
            each["dtype"],
            {None: "", 0: "one"}.get(each.get("pack_mb"), f"{each.get('pack_mb')} MB"),
            *(number(each.get(name)) for name in ("ms_per_step", "gb_per_sec", "bus_gb_per_sec")),
        )
        for each in [*own, *(reduce.get("settings") or ())]
    ]
    if reduce.get("latency_ms") is not None:
        rows.append(("4 bytes", "", number(reduce["latency_ms"]), "–", "–"))
    return rows


def _checkpoint(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    return _rows(
        found,
        ("size", "mb", "{:,.1f} MiB".format),
        ("write", "write_mb_per_sec", "{:,.0f} MiB/s".format),
        ("restore", "restore_mb_per_sec", "{:,.0f} MiB/s".format),
        ("training waits", "blocked_ms", "{:,.0f} ms a checkpoint".format),
        ("  and loses in all", "stall_ms", "{:,.0f} ms a checkpoint".format),
    )


def _profile(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (op["name"], op.get("type") or "", number(op.get("ms_per_step")), percent(op.get("share")))
        for op in (result.get("profile") or {}).get("ops") or ()
    ]


def _baseline(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    baseline = result.get("baseline") or {}
    rows = _rows(baseline, ("against", "path", str), ("against", "command", str), ("verdict", "verdict", str))
    if baseline.get("ratio") is not None:
        rows.append(("ratio", f"{baseline['ratio']:.3f}"))
    if baseline.get("interval"):
        rows.append(("  95 % interval", " – ".join(f"{end:.3f}" for end in baseline["interval"])))
    return rows


def _pairs(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lists the rates of runs in turn with the baseline, examples a second."""
    found = (result.get("baseline") or {}).get("rounds") or ()
    if len(found) < 2:  # the ratio says it
        return []
    return [
        (str(i), number(each["ours"]), number(each["theirs"]), f"{each['ratio']:.3f}")
        for i, each in enumerate(found, 1)
    ]


def _machine(found: Mapping[str, Any], noise: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if found.get("cpu"):
        memory = f", {found['memory_mb'] / 1024:.1f} GiB" if found.get("memory_mb") else ""
        cores = f", {found['usable_cores']:g} usable cores" if found.get("usable_cores") else ""
        rows.append(("machine", f"{found['cpu']}{cores}{memory}"))
    if found.get("gpus"):
        rows.append(("GPUs", ", ".join(found["gpus"])))
    if found.get("load_average"):
        rows.append(("load before", ", ".join(f"{load:.2f}" for load in found["load_average"])))
    rows += _rows(noise, ("others used", "other_cores", "{:.2f} cores during the rounds".format))
    if found.get("versions"):
        rows.append(("versions", ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)))
    if found.get("threads"):
        threads = [f"{name} {value or 'TensorFlow chooses'}" for name, value in found["threads"].items()]
        rows.append(("threads", ", ".join(threads)))
    if found.get("flags"):
        rows.append(("flags", " ".join(f"{name}={value}" for name, value in found["flags"].items())))
    return rows + _rows(found, ("system", "platform", str))
