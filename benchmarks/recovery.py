"""What a killed worker costs: Crankshaft beside torchrun with DDP on gloo, two workers, an equal mlp, in turn.

    python -m benchmarks.recovery --torch_python=.../bin/python --rounds=4 --kills=5

In each round each program starts, and one of its workers, by chance, is killed (SIGKILL) several times, a random moment
after the step that was new after the kill before. The table has the seconds from a kill to the next new step, one that
had not been reached before, and how many steps, and seconds of training, were lost. Each has its best settings:
torchrun looks for dead workers each 0.1 s, and its rank 0 saves as often as takes 0.5 % of the time; Crankshaft writes
a checkpoint every hour, and takes snapshots in memory. Its runs must end with all bits of an undisturbed one. With
`--starts=N` instead: the seconds to the first steps of four workers, forked by `crankshaft local` and started as four
programs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from crankshaft.parts.launchers.resources import free_ports, usable_cores

from .faults.campaign import Happened, costs
from .faults.job import variables
from .faults.plan import PLAN, Notes
from .faults.table import Injection
from .markdown import number, table
from .processes import ROOT, find_versions, untuned
from .rounds import FEWEST, cpu_model, interval
from .workloads import BATCH_SIZE, WORKLOADS

WORKERS = 2
WORKLOAD = dataclasses.replace(WORKLOADS["mlp"], examples=12_800)  # it is loaded again after each kill
_SILENT_SECONDS = 60.0  # without a new step: it hangs
_LOOK_SECONDS = 0.005
_PACE_SECONDS = (0.5, 4.0)  # from a new step to the next kill


class Failed(Exception):
    """A program did not do what it has to. One line."""


class Hangs(Failed):
    """A program makes no new steps."""


@dataclasses.dataclass
class Program:
    """A program that trains, in a folder of its own, and notes its steps there.

    Attributes:
      commands: of its processes, each with its own environment variables.
      folder: of its notes and all else.
    """

    commands: Sequence[tuple[Sequence[str], dict[str, str]]]
    folder: Path

    def __enter__(self) -> Program:
        self.began = time.monotonic()
        self._notes = [Notes(self.folder, f"worker {worker}") for worker in range(WORKERS)]
        self._seen = self._highest = 0
        variables = {**untuned(), PLAN: str(self.folder), "PYTHONPATH": str(ROOT)}
        with (self.folder / "log").open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    command,
                    env={**variables, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    start_new_session=True,
                )
                for command, own in self.commands
            ]
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes:
            process.wait()

    def notes(self, worker: int = 0) -> list[tuple[float, str, int]]:
        return self._notes[worker].read()

    def kill(self, worker: int) -> float:
        """Kills a worker; returns when."""
        pid = [pid for _, event, pid in self.notes(worker) if event == "starts"][-1]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def step(self) -> int:
        rows = self.notes()
        self._highest = max(self._highest, *(step for _, event, step in rows[self._seen :] if event == "step"), 0)
        self._seen = len(rows)
        return self._highest

    def wait_for_step(self, after: int) -> bool:
        """Waits for a step beyond one; returns False once the program has ended. Raises `Failed`."""
        end = time.monotonic() + _SILENT_SECONDS
        while self.step() <= after:
            if (code := self._processes[0].poll()) is not None:
                if code:
                    raise Failed(f"it ended with {code}; {self._last_lines()}")
                return False
            if time.monotonic() > end:
                raise Hangs(f"no new step in {_SILENT_SECONDS:g} s; {self._last_lines()}")
            time.sleep(_LOOK_SECONDS)
        return True

    def _last_lines(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join(["its last lines:", *lines])

    def wait(self) -> None:
        """Waits for its end. Raises `Failed`."""
        while self.wait_for_step(self.step()):
            pass


def crankshaft(folder: Path, steps: int, flags: Sequence[str]) -> Program:
    start = [sys.executable, "-m", "crankshaft", "local", f"--workers={WORKERS}", "--max_restarts=1000", "--"]
    return Program([([*start, *_training(folder, steps, WORKERS), *flags], {})], folder)


def _training(folder: Path, steps: int, workers: int) -> list[str]:
    flags = ["--mode=train", f"--train_steps={steps}", f"--run_dir={folder / 'run'}", "--seed=1", "--progress=off"]
    flags += [f"--global_batch_size={BATCH_SIZE * workers}", "--checkpoint_every_steps=1000000"]
    return ["-m", "benchmarks.peers.recovering", *WORKLOAD.flags, *flags]


def torchrun(folder: Path, steps: int, python: str) -> Program:
    start = [python, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
    start += ["--monitor-interval=0.1", "--standalone"]
    training = ["benchmarks.peers.ddp_recovering", f"--steps={steps}", f"--examples={WORKLOAD.examples}"]
    (folder / "crankshaft").symlink_to(ROOT)  # as which this Python imports it, whatever the checkout's name is
    return Program([([*start, "-m", *training], {"PYTHONPATH": f"{folder}:{ROOT}"})], folder)


def separate(folder: Path, workers: int) -> Program:
    """Four workers as programs of their own, with the cores and threads that `crankshaft local` would give them."""
    addresses, cores = [f"127.0.0.1:{port}" for port in free_ports(workers)], usable_cores()
    each = max(1, len(cores) // workers)
    commands = []
    for index in range(workers):
        config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        variables = {"TF_CONFIG": config, "TF_NUM_INTRAOP_THREADS": str(each), "OMP_NUM_THREADS": str(each)}
        training = [*_training(folder, 10**6, workers), "--strategy=multi_worker"]
        commands.append(([sys.executable, *training], variables))
    return Program(commands, folder)


def forked(folder: Path, workers: int) -> Program:
    start = [sys.executable, "-m", "crankshaft", "local", f"--workers={workers}", "--"]
    return Program([([*start, *_training(folder, 10**6, workers)], {})], folder)


def kill_workers(program: Program, kills: int, rng: random.Random) -> tuple[list[dict], str]:
    """Kills workers of a program that runs; returns what each kill has cost, and why it made no more steps, or ""."""
    happened, why = list[Happened](), ""
    try:
        goes_on = program.wait_for_step(0)
        while goes_on and len(happened) < kills:
            time.sleep(rng.uniform(*_PACE_SECONDS))
            worker, step = rng.randrange(WORKERS), program.step()
            happened.append(Happened(Injection("SIGKILL", f"worker {worker}", step, 0.0), program.kill(worker)))
            time.sleep(0.1)  # the other may have noted a step at the same moment
            goes_on = program.wait_for_step(program.step())
    except Hangs as hang:
        why = str(hang)
    return [each for each in costs(happened, program.notes()) if each["seconds"] is not None], why


def compare(arguments: argparse.Namespace, folder: Path) -> str:
    """Kills workers of each program in turn, and returns the table."""
    found, rng = defaultdict[str, list[dict]](list), random.Random(arguments.seed)
    hung = Counter[str]()
    ours, expected, different = " ".join(["crankshaft local", *arguments.flags]), None, 0
    makes = {ours: crankshaft, **({"torchrun": torchrun} if arguments.torch_python else {})}
    if arguments.bits:
        with crankshaft(_new(folder / "undisturbed"), arguments.steps, ()) as program:
            program.wait()
        expected = variables(program.folder / "run")
    for turn in range(arguments.rounds):
        for name, make in makes.items():
            options = arguments.flags if name == ours else arguments.torch_python
            with make(_new(folder / f"{make.__name__} {turn}"), arguments.steps, options) as program:
                of_it, why = kill_workers(program, arguments.kills, rng)
                found[name] += of_it
                if why:
                    hung[name] += 1
                    print(f"{name} hangs after a kill: {why}", flush=True)
                if expected and name == ours and not why:
                    program.wait()
            if expected and name == ours:
                different += variables(program.folder / "run") != expected
            print(f"{turn + 1}/{arguments.rounds} {name}: {', '.join(map(_line, of_it))}", flush=True)
    lines = [_table(found)]
    lines += [f"{name}: {count} times no step in {_SILENT_SECONDS:g} s after a kill" for name, count in hung.items()]
    if arguments.bits:
        lines.append(f"{different} of {arguments.rounds} runs ended with other bits than an undisturbed one")
    return "\n\n".join(lines)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _line(cost: dict) -> str:
    return f"{cost['seconds']} s ({cost['steps_lost']} steps, {cost['seconds_lost']} s lost)"


def _table(found: dict[str, list[dict]]) -> str:
    header = ["two workers, mlp 784-128-10", "kills", "seconds to the next new step: median (95 %), worst"]
    rows = []
    for name, of_it in found.items():
        cells = [_spread([each[key] for each in of_it]) for key in ("seconds", "seconds_lost", "steps_lost")]
        rows.append([name, str(len(of_it)), *cells])
    return table([*header, "seconds of training lost", "steps lost"], rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    sure = " ({} to {})".format(*map(number, interval(values))) if len(values) >= FEWEST else ""
    return f"{number(statistics.median(values))}{sure}, {number(max(values))}"


def compare_starts(starts: int, folder: Path) -> str:
    """Starts four workers in both ways in turn, and returns the table of the seconds to their first steps."""
    found = defaultdict[str, list[float]](list)
    for turn in range(starts):
        for make in (forked, separate):
            with make(_new(folder / f"{make.__name__} {turn}"), 4) as program:
                program.wait_for_step(0)
                found[make.__name__].append(next(at for at, event, _ in program.notes() if event == "step"))
                found[make.__name__][-1] -= program.began
            print(f"{make.__name__}: {found[make.__name__][-1]:.2f} s", flush=True)
    rows = [["`crankshaft local --workers=4`", _spread(found["forked"])]]
    rows.append(["four programs that import TensorFlow", _spread(found["separate"])])
    return table(["four workers, mlp 784-128-10", "seconds to the first steps: median (95 %), worst"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", help="a Python that has torch and numpy; without it Crankshaft is alone")
    parser.add_argument("--rounds", type=int, default=4, help="starts of each program (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="in each run (%(default)s)")
    parser.add_argument("--steps", type=int, default=20_000, help="of a run; it may end before its kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the workers (%(default)s)")
    parser.add_argument("--bits", action="store_true", help="let Crankshaft's runs end, and compare their bits")
    parser.add_argument("--starts", type=int, help="measure so many starts of four workers instead")
    parser.add_argument("flags", nargs="*", help="of Crankshaft's training, after --")
    arguments = parser.parse_args()
    if arguments.torch_python:
        find_versions(arguments.torch_python, ["torch", "numpy"])
    with tempfile.TemporaryDirectory(prefix="crankshaft-recovery-") as folder:
        print(f"{cpu_model()}, {len(usable_cores())} cores, load {os.getloadavg()[0]:.2f}\n", flush=True)
        if arguments.starts:
            print(compare_starts(arguments.starts, Path(folder)))
        else:
            print("\n" + compare(arguments, Path(folder)))


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"error: {failure}")
