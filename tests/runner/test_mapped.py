"""Data in a file that is mapped: read in pieces, by processes of their own, whose memory is measured."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

SCRIPT = pathlib.Path(__file__).with_name("mapped_run.py")
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
