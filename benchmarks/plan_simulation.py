"""The simulation of many hosts beside published runs, and beside workers that wait instead of compute. A script.

Run it from the repository: `.venv/bin/python -m benchmarks.plan_simulation`, and with `--workers=1,2,4,8` for processes
on this machine, which takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from crankshaft.parts.plan.simulation import Scenario, simulate

from .markdown import table
from .processes import ROOT, run_script

HOUR, DAY = 3600.0, 86_400.0
STEP_SECONDS, JITTER, STEPS = 0.2, 0.25, 100


def published() -> list[list[str]]:
    """Rows: what was published, what is assumed, both figures."""
    rows = []
    # The Llama 3 Herd of Models, arXiv 2407.21783, 3.3.4: 419 unexpected and 47 planned interruptions in 54 days of
    # 16,384 GPUs, 8 per host; 78 % of the former were of hardware.
    llama = Scenario(
        hosts=2048,
        examples=1,
        compute_seconds=1.0,
        failures_per_host_hour=466 / (54 * 24 * 2048),
        lost_hosts=0.78,
        checkpoint_seconds=5.0,
        checkpoint_every_seconds=0.25 * HOUR,
    )
    for minutes in (5, 10):
        down = {"recovery_seconds": 60.0 * minutes, "lost_host_seconds": 60.0 * minutes}
        outcome = simulate(Scenario(**{**vars(llama), **down}), days=54.0)
        assumed = f"a checkpoint every 15 min, which takes 5 s; {minutes} min from a failure to the next step"
        rows.append(["Llama 3, 16,384 GPUs", "effective time", assumed, "> 90 %", f"{outcome.goodput:.1%}"])
    # MegaScale, arXiv 2402.15627, 6.3: over 100 restarts in several weeks, found and diagnosed in less than 10 min on
    # average, and at the former step within 15 min of the last checkpoint.
    megascale = Scenario(
        hosts=1536,
        examples=1,
        compute_seconds=1.0,
        failures_per_host_hour=100 / (28 * 24 * 1536),
        recovery_seconds=600.0,
        lost_host_seconds=600.0,
        checkpoint_every_seconds=0.5 * HOUR,
        checkpoint_seconds=5.0,
    )
    outcome = simulate(megascale, days=28.0)
    assumed = "100 in 4 weeks; a checkpoint every 30 min, which takes 5 s; 10 min to the next step"
    rows.append(["MegaScale, 12,288 GPUs", "effective time", assumed, "> 90 %", f"{outcome.goodput:.1%}"])
    # Horovod, arXiv 1802.05799: 128 hosts of 4 P100, 25 Gbit/s. One P100's rates at a batch of 64 are TensorFlow's
    # published benchmarks; an all-reduce by a ring sends 2 * 511 / 512 of the float32 gradients through each host.
    for model, weights, images_per_sec, was in (
        ("Inception V3", 23.9e6, 142, "90 %"),
        ("VGG-16", 138.4e6, 154, "68 %"),
    ):
        compute, network = 64 / images_per_sec, 2 * 511 / 512 * 4 * weights / (25e9 / 8)
        shown = []
        for overlapped in (0.0, 2 / 3 * compute):  # a backward pass takes two thirds of the step
            exposed = max(0.0, network - overlapped)
            scenario = Scenario(hosts=128, examples=1, compute_seconds=compute, network_seconds=exposed, jitter=0.02)
            alone = Scenario(hosts=1, examples=1, compute_seconds=compute)
            shown.append(simulate(scenario).examples_per_sec / simulate(alone).examples_per_sec)
        assumed = "jitter 2 %; no, or all gradients travel during the backward pass"
        figures = f"{shown[0]:.0%} to {shown[1]:.0%}"
        rows.append([f"Horovod, {model}, 512 GPUs", "scaling efficiency", assumed, was, figures])
    return rows


def waiting(workers: int) -> float:
    """Returns the steps per second of so many synchronous workers that wait a random time instead of computing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        trains = ["-m", "benchmarks.peers.waiting", f"--model_arg=mean={STEP_SECONDS}", f"--model_arg=jitter={JITTER}"]
        flags = [
            "--strategy=multi_worker",
            "--input=digits",
            f"--train_steps={STEPS}",
            f"--global_batch_size={8 * workers}",
            "--jit=off",
        ]
        local = [sys.executable, "-m", "crankshaft", "local", f"--workers={workers}", "--", *trains, *flags]
        subprocess.run([*local, f"--result_json={path}", "--progress=off"], cwd=ROOT, check=True, capture_output=True)
        return json.loads(path.read_text())["steps_per_sec"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="", help="numbers of processes to start in turn, with commas")
    arguments = parser.parse_args()
    print(table(["run", "figure", "assumed", "published", "simulated"], published(), names=3))
    counts = [int(each) for each in arguments.workers.split(",") if each]
    if not counts:
        return
    measured = {count: waiting(count) for count in counts}
    # What one worker takes beyond its wait is the loop's own.
    own = 1 / measured[counts[0]] - STEP_SECONDS
    rows = []
    for count, rate in measured.items():
        scenario = Scenario(hosts=count, examples=1, compute_seconds=STEP_SECONDS, network_seconds=own, jitter=JITTER)
        rows.append([str(count), f"{rate:.3f}", f"{simulate(scenario).examples_per_sec:.3f}"])
    print(f"\n{table(['workers', 'steps/s, measured', 'simulated'], rows)}")


if __name__ == "__main__":
    run_script(main)
