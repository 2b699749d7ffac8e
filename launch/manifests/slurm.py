"""Writes the script that `sbatch` takes (https://slurm.schedmd.com/sbatch.html)."""

from __future__ import annotations

import re
import shlex
import string

from ..errors import EXIT_DIVERGED, EXIT_USAGE
from .job import Job

_SCRIPT = string.Template(
    """\
#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --ntasks=$tasks
#SBATCH --cpus-per-task=$cpus
#SBATCH --mem-per-cpu=${memory_mb}M
${gpus}#SBATCH --time=$time
# Two minutes before the limit all tasks get SIGTERM, save and end, and the job continues in its next turn.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append

# The tasks sign their messages to each other with this; only they know it.
CRANKSHAFT_JOB_SECRET=$$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')
export CRANKSHAFT_JOB_SECRET
export PYTHONUNBUFFERED=1

# Each task finds its index in Slurm's variables. If one fails, the others name it and end by themselves: if srun ended
# them, the job would have the code of that end, instead of the one that names the cause.
srun --kill-on-bad-exit=0 --cpus-per-task=$cpus \\
  $command
code=$$?

# 0: done. 2: a mistake, and 65: the run diverged, which a restart would repeat. All else begins again from the last
# checkpoint.
case $$code in
  0 | $mistake | $diverged) ;;
  *) [ "$${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$$SLURM_JOB_ID" ;;
esac
exit $$code
"""
)
_UNITS = {None: 1 / 2**20, "k": 1e3 / 2**20, "Ki": 1 / 2**10, "M": 1e6 / 2**20, "Mi": 1, "G": 1e9 / 2**20, "Gi": 2**10}
_UNITS |= {"T": 1e12 / 2**20, "Ti": 2**20}
QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kMGT]i?)?")


def script(job: Job) -> str:
    """Returns the script, which runs one task of Slurm's for each of the job's."""
    return _SCRIPT.substitute(
        name=job.name,
        tasks=sum(job.kinds.values()),
        cpus=job.cpus,
        memory_mb=max(1, round(mebibytes(job.memory) / job.cpus)),
        gpus=f"#SBATCH --gpus-per-task={job.gpus_per_worker}\n" if job.gpus_per_worker else "",
        time=job.time,
        mistake=EXIT_USAGE,
        diverged=EXIT_DIVERGED,
        command=" \\\n  ".join([shlex.join(job.start), *map(shlex.quote, job.command[len(job.start) :])]),
    )


def mebibytes(quantity: str) -> float:
    """Returns a `QUANTITY` of memory in MiB."""
    number, unit = QUANTITY.fullmatch(quantity).groups()
    return float(number) * _UNITS[unit]
