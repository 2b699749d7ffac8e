"""One slow worker: what it costs workers that wait for each other, and what those that do not. A script, not a test.

Two workers share this machine's cores, in lockstep (multi_worker) or around a parameter server. In every second
measurement one of them is stopped most of the time (SIGSTOP, SIGCONT), as by a neighbour that takes its core. Run it
from the repository: `.venv/bin/python -m benchmarks.slow_worker`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
from pathlib import Path

from crankshaft.launch.cluster.children import Child, Children, wait

from .race import MEASUREMENT_TIMEOUT_SECONDS, PYTHON, ROOT, read_result, run_script, table

SLOW = "worker 1"
PERIOD_SECONDS = 0.05
BATCH_SIZE = 256  # a worker's
# Much to compute and little to send: what is measured is the waiting.
WORK = ("--model=cnn", "--input=synthetic", "--input_arg=shape=12,12,1", "--input_arg=examples=8192")
# What `crankshaft local` is asked for, the flags, and the workers whose examples are in one update.
WAYS = {
    "multi_worker": (("--workers=2",), ("--strategy=multi_worker",), 2),
    "parameter_server": (("--workers=2", "--ps=1"), ("--strategy=parameter_server",), 1),
    "parameter_server, at most 8 updates ahead": (
        ("--workers=2", "--ps=1"),
        ("--strategy=parameter_server", "--max_staleness_steps=8"),
        1,
    ),
    "parameter_server, in rounds": (
        ("--workers=2", "--ps=1"),
        ("--strategy=parameter_server", "--max_staleness_steps=0"),
        1,
    ),
}


def command_of(way: str, steps: int) -> list[str]:
    tasks, flags, workers = WAYS[way]
    return [
        *(PYTHON, "-m", "crankshaft", "local", *tasks, "--", *flags, *WORK),
        *(f"--global_batch_size={BATCH_SIZE * workers}", "--mode=benchmark"),
        # Updates of two workers' examples are half as many.
        *(f"--benchmark_arg=steps={2 * steps // workers}", "--progress=plain"),
    ]


def examples_per_second(command: list[str], stopped: float) -> float:
    """Of one run, in which `SLOW` is stopped for that share of the time once steps begin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        ended = threading.Event()
        with Children() as children:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            job = children.start([*command, f"--result_json={path}"], env=os.environ, cwd=ROOT, **streams)
            impatience = threading.Timer(MEASUREMENT_TIMEOUT_SECONDS, job.send, [signal.SIGTERM])
            impatience.start()
            try:
                lines = hold_up(job, stopped, ended)
            finally:
                ended.set()
                impatience.cancel()
            wait([job], math.inf)
            [code] = children.end([job])
        if code:
            raise SystemExit("".join([*lines[-20:], f"{' '.join(command)} ended with {code}"]))
        return read_result(path)["examples_per_sec"]


def hold_up(job: Child, stopped: float, ended: threading.Event) -> list[str]:
    """Reads the job's output to its end; once it says that steps begin, one worker is stopped and let go."""
    process, lines = None, []
    while line := job.stdout.readline().decode():
        lines.append(line)
        if match := re.match(rf"\[local\] {SLOW} is process (\d+)", line):
            process = int(match[1])
        elif stopped and process and "XLA" in line:
            threading.Thread(target=stop_and_go, args=(process, stopped, ended), daemon=True).start()
            stopped = 0.0
        elif f"{SLOW} ended" in line or "chief ended" in line:
            ended.set()
    return lines


def stop_and_go(process: int, stopped: float, ended: threading.Event) -> None:
    """Stops a process for a share of each period."""
    try:
        while not ended.is_set():
            os.kill(process, signal.SIGSTOP)
            ended.wait(stopped * PERIOD_SECONDS)
            os.kill(process, signal.SIGCONT)
            ended.wait((1 - stopped) * PERIOD_SECONDS)
    except ProcessLookupError:
        return


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help=f"batches of {BATCH_SIZE} (%(default)s)")
    parser.add_argument("--stopped", type=float, default=0.8, help="share of the time (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rates = {(way, stopped): [] for way in WAYS for stopped in (0.0, arguments.stopped)}
    for _, (way, stopped) in itertools.product(range(arguments.rounds), rates):
        command = command_of(way, arguments.steps)
        rates[way, stopped].append(examples_per_second(command, stopped))
        print(f"{' '.join(command)}\n  stopped {stopped:.0%}: {rates[way, stopped][-1]:,.0f} examples/s", flush=True)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    rows = []
    for way in WAYS:
        even, slow = medians[way, 0.0], medians[way, arguments.stopped]
        rows.append([way, f"{even:,.0f}", f"{slow:,.0f}", f"**{slow / even:.0%}**"])
    print()
    print(table(["examples/s", "both alike", f"one stopped {arguments.stopped:.0%} of the time", "left"], rows))


if __name__ == "__main__":
    run_script(main)
