"""The job that all manifests are made from. Host code."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Job:
    """A cluster that trains, and what each of its tasks needs: `crankshaft manifest`'s flags, by their names.

    Attributes:
      name: the job's.
      workers: how many train.
      ps: parameter servers; with any, the job has a coordinator too.
      evaluator: whether a task evaluates each checkpoint.
      gpus_per_worker: GPUs of each worker.
      cpus: cores of each task.
      memory: of each task, as Kubernetes writes it.
      time: the limit, as Slurm writes it.
      image: the container's; None for Slurm.
      claim: name of the claim of the volume that all tasks share.
      program: what Python runs: (script,) or ("-m", module); () is `crankshaft train`.
      words: its flags.
    """

    name: str
    workers: int
    ps: int
    evaluator: bool
    gpus_per_worker: int
    cpus: int
    memory: str
    time: str
    image: str | None
    claim: str
    program: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def kinds(self) -> dict[str, int]:
        """The number of tasks of each kind, in the tasks' order."""
        if not self.ps:
            return {"worker": self.workers}
        kinds = {"chief": 1, "worker": self.workers, "ps": self.ps}
        return {**kinds, "evaluator": 1} if self.evaluator else kinds

    @property
    def start(self) -> list[str]:
        """The first words of each task's command."""
        return ["python", *self.program] if self.program else ["crankshaft", "train"]

    @property
    def command(self) -> list[str]:
        """Each task's command."""
        counts = [f"--num_ps={self.ps}"] * bool(self.ps) + ["--evaluator"] * self.evaluator
        return [*self.start, *self.words, *counts]
