"""Times how long a run of two workers takes to its first checkpoint, by `sbatch` and by `crankshaft local` in turn.

Usage: python -m tests.clusters.first_step FOLDER [ROUNDS], with a Slurm that slurm_up.sh FOLDER has started.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from tests.clusters.conftest import Slurm
from tests.runs import newest
from tests.waiting import wait_until

RUN = ("--model=mlp", "--input=digits", "--jit=off", "--train_steps=1", "--checkpoint_every_steps=1")


def seconds_to_first_checkpoint(begun: float, run_dir: pathlib.Path) -> float:
    """Returns the seconds from a time by the monotonic clock to a run's first checkpoint."""
    wait_until(lambda: newest(run_dir) >= 1)
    return time.monotonic() - begun


def main(folder: str, rounds: str = "3") -> None:
    slurm = Slurm(pathlib.Path(folder))
    runs = pathlib.Path(tempfile.mkdtemp(dir=folder))
    taken: dict[str, list[float]] = {"crankshaft local": [], "sbatch": []}
    for number in range(int(rounds)):
        run_dir = runs / f"local-{number}"
        command = (sys.executable, "-m", "crankshaft", "local", "--workers=2", "--", *RUN, f"--run_dir={run_dir}")
        begun = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            taken["crankshaft local"].append(seconds_to_first_checkpoint(begun, run_dir))
        run_dir = runs / f"sbatch-{number}"
        script = slurm.script("--workers=2", "--", *RUN, f"--run_dir={run_dir}")
        begun = time.monotonic()
        job = slurm.sbatch(script)
        taken["sbatch"].append(seconds_to_first_checkpoint(begun, run_dir))
        slurm.done(job)
    for name, values in taken.items():
        print(f"{name}: median {statistics.median(values):.1f} s of {', '.join(f'{each:.1f}' for each in values)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
