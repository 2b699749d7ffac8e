"""What all manifests are made from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Job:
    """A cluster that trains, and what each of its tasks needs: `crankshaft manifest`'s flags, by their names.

    Attributes:
      name: the job's.
      workers: how many train.
      ps: parameter servers; with some there is a coordinator too.
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
        """How many tasks there are of each kind, in the tasks' order."""
        if not self.ps:
            return {"worker": self.workers}
        kinds = {"chief": 1, "worker": self.workers, "ps": self.ps}
        return {**kinds, "evaluator": 1} if self.evaluator else kinds

    @property
    def start(self) -> list[str]:
        """The first words of what each task runs."""
        return ["python", *self.program] if self.program else ["crankshaft", "train"]

    @property
    def command(self) -> list[str]:
        """What each task runs."""
        counts = [f"--num_ps={self.ps}"] * bool(self.ps) + ["--evaluator"] * self.evaluator
        return [*self.start, *self.words, *counts]
