"""How fast the page of a long run opens: a record of many workers' figures, made from a seed, in a headless Chromium.

    python -m benchmarks.monitor_page --workers=1000 --windows=7400

Prints the record's size, the seconds until the page has its curves and lanes, until all is read, and how long the page
is busy with a second's news.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.browser import chromium, monitor

_CHECKPOINT_WINDOWS, _EVALUATION_WINDOWS = 50, 25
_STEPS = 100  # of a window


def events(
    seed: int, *, workers: int = 4, windows: int = 200, period: float = 1.0, begin: float = 1.7e9, name: str = "mlp"
) -> Iterator[dict[str, Any]]:
    """Yields a run's record, as docs/events.md has it: it is restarted once, and ends."""
    random = np.random.default_rng(seed)
    names = [f"worker {number}" for number in range(workers)]
    spent = dict.fromkeys("steps start compile input waiting checkpoints evaluation lost down".split(), 0.0)

    def at(event: str, time: float, step: int, **more: Any) -> dict[str, Any]:
        return {"event": event, "time": round(time, 3), "step": step, **more}

    def started(attempt: int, time: float, step: int, cause: str | None) -> Iterator[dict[str, Any]]:
        about = {"pid": 1, "host": "here", "mode": "train", "until_step": windows * _STEPS, "steps_per_epoch": 1000}
        yield at("start", time, step, version=1, attempt=attempt, cause=cause, **about)
        yield at("config", time, step, values={"model": name, "learning_rate": 1e-3 * (1 + seed), "seed": seed})
        addresses = [{"name": each, "address": f"10.0.0.{index}:2222"} for index, each in enumerate(names)]
        yield at("cluster", time, step, strategy="multi_worker", replicas=workers, workers=addresses, servers=[])

    yield from started(0, begin, 0, None)
    now, total = begin, 0.0
    for window in range(1, windows + 1):
        step, now = window * _STEPS, now + period
        parts = {"steps": 0.8, "input": 0.1, "waiting": 0.1}
        if window == windows // 2:
            yield at("fault", now, step, task=names[-1], text="nothing was heard of it for 5 s")
            yield at("restart", now, step, task=names[-1], cause="killed by SIGKILL", exit_code=-9)
            now += 5 * period
            spent["down"] += 4 * period
            spent["lost"] += period
            yield from started(1, now, step - _STEPS, f"{names[-1]} was killed by SIGKILL")
        for part, share in parts.items():
            spent[part] += share * period
        total = now - begin
        loss = 2.3 * (window + 3) ** -0.4 + 0.02 * random.standard_normal()
        rate = _STEPS / period * (1 + 0.05 * random.standard_normal())
        yield at(
            *("window", now, step),
            epoch=step / 1000,
            seconds=now - begin,
            seconds_left=(windows - window) * period,
            metrics={"loss": round(loss, 5), "accuracy": round(1 - loss / 2.5, 5)},
            learning_rate=1e-3 * (1 + seed),
            steps_per_sec=round(rate, 3),
            examples_per_sec=round(64 * rate, 1),
            input_wait_fraction=0.1,
            reduce_fraction=0.1,
            workers=_figures(names, 1000 * period / _STEPS, random),
            spent={"total": total, **spent},
            memory_mb=900 + window / windows,
        )
        if window % _EVALUATION_WINDOWS == 0:
            yield at("evaluation", now, step, metrics={"loss": round(loss * 1.1, 5)}, seconds=0.1 * period)
        if window % _CHECKPOINT_WINDOWS == 0:
            yield at("checkpoint", now, step, path=f"ckpt-{step}", seconds=0.2, bytes=5_000_000, best=window % 100 == 0)
    goodput = {"share": spent["steps"] / total, "seconds": {"total": total, **spent}}
    yield at("end", now, windows * _STEPS, reason="complete", exit_code=0, goodput=goodput)


def _figures(names: list[str], step_ms: float, random: np.random.Generator) -> list[dict[str, Any]]:
    ms = step_ms * (0.8 + 0.1 * random.random(len(names)))
    ms[1:2] *= 1.8
    norms = random.random(len(names))
    return [
        {
            "name": name,
            "step_ms": round(float(ms[index]), 3),
            "input_wait_ms": round(float(ms[index]) / 10, 3),
            "reduce_wait_ms": round(float(ms[-1 - index]) / 8, 3),
            "gradient_norm": round(float(norms[index]), 4),
        }
        for index, name in enumerate(names)
    ]


def write(path: pathlib.Path, lines: Iterator[dict[str, Any]]) -> None:
    """Writes a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=7400, help="as many as a run of a week writes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder, "week", "events.jsonl")
        week = 7 * 24 * 3600
        write(record, events(0, workers=args.workers, windows=args.windows, period=week / args.windows))
        print(f"{record.stat().st_size / 1e6:.0f} MB, {args.windows} windows of {args.workers} workers", flush=True)
        with monitor(record.parent) as link, chromium() as browser:
            page = browser.new_page()
            before = time.monotonic()
            page.goto(link)
            page.wait_for_selector("#curve-charts canvas")
            page.wait_for_selector("#lanes canvas")
            print(f"opened with curves and lanes in {time.monotonic() - before:.2f} s", flush=True)
            page.locator("#news", has_not_text="reading").wait_for()
            print(f"all read in {time.monotonic() - before:.2f} s", flush=True)
            busy = page.evaluate("() => { const t = performance.now(); render(); return performance.now() - t; }")
            print(f"drawn again in {busy:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
