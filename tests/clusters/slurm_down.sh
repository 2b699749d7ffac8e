#!/usr/bin/env bash
# slurm_down.sh FOLDER: ends the Slurm that slurm_up.sh FOLDER has started, with the jobs that it runs.
set -uo pipefail
folder=$1
export SLURM_CONF=$folder/slurm.conf
scancel --state=RUNNING --state=PENDING 2> /dev/null
for _ in $(seq 40); do
  [ -z "$(squeue -h 2> /dev/null)" ] && break
  sleep 0.5
done
for pid in "$folder"/n1/slurmd.pid "$folder"/n2/slurmd.pid "$folder"/slurmctld.pid "$folder"/munge/pid; do
  [ -f "$pid" ] && kill "$(cat "$pid")" 2> /dev/null
done
sed -i '/# crankshaft-test-n[12]$/d' /etc/hosts 2> /dev/null || sed '/# crankshaft-test-n[12]$/d' /etc/hosts > "$folder/hosts" && cp "$folder/hosts" /etc/hosts 2> /dev/null
exit 0
