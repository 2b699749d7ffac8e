"""A peer's side of a measurement: its arguments, its turns, its result. Runs in every peer, in any library's Python.

A peer that stays prints "ready" once it is warmed up, or "ready" and its losses as JSON. Then each line of its standard
input is a number of steps, which it does, and answers with steps per second. Other checkouts' peers do the same, so
this stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

READY = "ready"


def parse_arguments(doc: str, workloads, **more: Mapping) -> argparse.Namespace:
    """Parses a peer's command line. `more`: options of its own, as keywords of `add_argument` by name."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--workload", choices=workloads, required=True)
    parser.add_argument("--quality_steps", type=int, default=0, help="steps before the losses are compared; 0: not")
    for name, keywords in more.items():
        parser.add_argument(f"--{name}", **keywords)
    return parser.parse_args()


def take_turns(rate: Callable[[int], float], answers: TextIO | None = None, quality: Mapping | None = None) -> None:
    """Answers each line of standard input, a number of steps, with `rate` of it, until there is none.

    Args:
      rate: does so many steps; returns steps per second.
      answers: standard output, if `sys.stdout` is not.
      quality: loss and metric of the evaluation data.
    """
    print(READY, json.dumps(quality) if quality else "", file=answers, flush=True)
    for line in sys.stdin:
        print(rate(int(line)), file=answers, flush=True)


# Of a program that runs to its end.
TIMED = {"seconds": {"type": float, "required": True}, "result_json": {"required": True}}


def timed(train: Callable[[int], object], seconds: float, agree: Callable[[int], int] = int) -> float:
    """Trains for about so many seconds, after shorter calls to warm up.

    Args:
      train: does so many steps, and waits for them.
      seconds: how long.
      agree: makes the first worker's number of steps that of all.

    Returns:
      Steps per second.
    """
    steps, rate = 2, 1.0
    for share in (0.0, 0.05, 0.2, 1.0):
        steps = agree(max(steps, round(share * seconds * rate)))
        began = time.perf_counter()
        train(steps)
        rate = steps / (time.perf_counter() - began)
    return rate


def write_result(path: str, result: Mapping) -> None:
    Path(path).write_text(json.dumps(result), encoding="utf-8")
