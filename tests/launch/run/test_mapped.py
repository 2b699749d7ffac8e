"""Data in a file that is mapped: read in pieces, by processes of their own, whose memory is measured."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.processes import peak_mib
from tests.waiting import PATIENCE

SCRIPT = pathlib.Path(__file__).parents[1] / "mapped_run.py"
MIB = 512


def peak(tmp_path, mib, *flags):
    path = tmp_path / f"{mib}.bin"
    with open(path, "wb") as file:
        file.truncate(mib << 20)
    command = [sys.executable, str(SCRIPT), str(mib), str(path), "--train_steps=600", "--eval_every_steps=600"]
    flags = ("--global_batch_size=128", "--jit=off", "--progress=plain", *flags)
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "131072"}  # what is freed goes back at once
    done = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(re.search(r"peak (\d+)", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resident", "copies"),
    [pytest.param(1, 0, id="streamed"), pytest.param(MIB, 0.5, id="resident", marks=pytest.mark.slow)],
)
def test_a_mapped_file_costs_a_piece_or_the_copy_that_trains(tmp_path, resident, copies):
    """512 MiB of float64, all of it read: streamed, a piece and blocks; resident, what it is as float32."""
    small = peak(tmp_path, 8, "--resident_data_mb=1")
    large = peak(tmp_path, MIB, f"--resident_data_mb={resident}")
    assert large - small < copies * MIB + MIB / 2


def peaks_with_servers(crank, tmp_path, mib) -> dict[str, int]:
    """MiB that each task of a cluster has taken at most."""
    path = tmp_path / f"{mib}.bin"
    with open(path, "wb") as file:
        file.truncate(mib << 20)
    own = ("--train_steps=200", "--eval_every_steps=0", "--global_batch_size=128", "--jit=off", "--progress=plain")
    examples = mib * 128  # all of them
    program = crank.start("--workers=2", "--ps=1", "--", SCRIPT, str(mib), path, examples, *own, command="local")
    peaks = {}
    while program.process.poll() is None:
        for task, pid in re.findall(r"^\[local\] (\S+(?: \d+)?) is process (\d+)", program.err, re.MULTILINE):
            if mib := peak_mib(pid):
                peaks[task] = mib
        time.sleep(0.05)
    program.wait().ok()
    assert set(peaks) == {"chief", "worker 0", "worker 1", "ps 0"}
    return peaks


@pytest.mark.slow
def test_with_servers_a_mapped_file_costs_each_worker_its_copies_and_others_a_piece(crank, tmp_path):
    """Each worker has the examples to train on and those of the evaluation, here the same, as float32."""
    small, large = (peaks_with_servers(crank, tmp_path, mib) for mib in (8, MIB))
    for task in small:
        copies = 2 * MIB / 2 if task.startswith("worker") else 0
        assert large[task] - small[task] < copies + 200  # 64 MiB of the map, and of pieces of 16 MiB a few
