#!/usr/bin/env bash
# Runs a command as tasks of Slurm that train together: sbatch --ntasks=8 slurm.sh crankshaft train --run_dir=... ...
# Options of sbatch go before this file's name, and win over the lines below.
#SBATCH --job-name=train
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=4
#SBATCH --mem-per-cpu=2G
#SBATCH --time=24:00:00
# Two minutes before the limit all tasks get SIGTERM, save and end, and the job continues in its next turn.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append

if [ $# -eq 0 ]; then
  echo "give the tasks' command, such as crankshaft train --run_dir=..." >&2
  exit 2
fi

# The tasks sign their messages to each other with this; only they know it.
CRANKSHAFT_JOB_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export CRANKSHAFT_JOB_SECRET
export PYTHONUNBUFFERED=1

# Each task finds its index in Slurm's variables. If one fails, the others name it and end by themselves: if srun ended
# them, the job would have the code of that end, instead of the one that names the cause.
srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$@"
code=$?

# 0: done. 2: a mistake, and 65: the run diverged, which a restart would repeat. All else begins again from the last
# checkpoint.
case $code in
  0 | 2 | 65) ;;
  *) [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
