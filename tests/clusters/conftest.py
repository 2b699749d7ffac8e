"""Slurm on two virtual nodes, and pods of podman's, for the tests of this folder: `make test-clusters` runs them."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.clusters.job_controller import JobController
from tests.waiting import wait_until

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"


class Slurm:
    """A cluster of Slurm's that is up. Jobs write their output to FOLDER/NAME-ID.out."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        bin_folder = pathlib.Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        }

    def __call__(self, *command: str) -> str:
        """Returns what a command prints."""
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *flags: str, options: tuple[str, ...] = (), nodes: int = 2, tasks_per_node: int = 2) -> str:
        """Submits examples/slurm.sh with flags of `crankshaft train` and options of sbatch; returns the job's id."""
        where = (f"--nodes={nodes}", f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=2", "--mem-per-cpu=1G")
        return self("sbatch", "--parsable", *where, *options, str(EXAMPLES / "slurm.sh"), "crankshaft", "train", *flags)

    def output(self, job: str) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(f"*-{job}.out"))

    def state(self, job: str, name: str = "JobState") -> str:
        return self("scontrol", "show", "job", job).partition(f" {name}=")[2].split()[0]

    def until(self, job: str, condition) -> None:
        wait_until(condition, shows=lambda: f"{self.state(job)}\n{self.output(job)}")

    def done(self, job: str) -> str:
        """Returns the job's output once it has completed; fails if it ends otherwise."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.until(job, lambda: self.state(job) in ended)
        assert self.state(job) == "COMPLETED", self.output(job)
        return self.output(job)


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory):
    missing = [name for name in ("podman", "runc", "catatonit", "tar") if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"needs root, and Debian's podman, runc and catatonit; missing: {', '.join(missing) or 'root'}")
    controller = JobController(tmp_path_factory.mktemp("kubernetes"))
    try:
        controller.podman("run", "--rm", "--volume=/usr:/usr:ro", "localhost/this-machine", "true")
    except AssertionError as error:
        pytest.skip(f"podman can't run containers here: {error}")
    yield controller
    controller.podman("rmi", "--all", "--force")


@pytest.fixture
def pods(kubernetes):
    """Applies a file of examples/ under another name, with another program, and removes it in the end."""

    def apply(file: str, name: str, *command: str) -> JobController:
        kubernetes.apply((EXAMPLES / file).read_text("utf-8").replace("first", name), command)
        return kubernetes

    yield apply
    kubernetes.remove()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"needs root, and Debian's slurm-wlm and munge; missing: {', '.join(missing) or 'root'}")
    folder = tmp_path_factory.mktemp("slurm")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)  # munged is of another user
    subprocess.run([HERE / "slurm_up.sh", folder], check=True)
    yield Slurm(folder)
    subprocess.run([HERE / "slurm_down.sh", folder], check=True)
