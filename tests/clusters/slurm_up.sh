#!/usr/bin/env bash
# slurm_up.sh FOLDER: starts a Slurm of two virtual nodes, n1 and n2, on this machine; its files are in FOLDER.
#
# Needs root, and Debian's slurm-wlm and munge. Then: export SLURM_CONF=FOLDER/slurm.conf; sbatch, squeue, ...
# slurm_down.sh FOLDER ends what this has started. Nodes' names get addresses of this machine in /etc/hosts.
set -euo pipefail
folder=$1
mkdir -p "$folder"/{state,n1,n2,munge}
chmod 755 "$folder"
dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 status=none
chmod 700 "$folder/munge"
chmod 600 "$folder/munge/key"
chown -R munge "$folder/munge"
for number in 1 2; do
  grep -q "crankshaft-test-n$number" /etc/hosts || echo "127.0.9.$number n$number # crankshaft-test-n$number" >> /etc/hosts
done
cat > "$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
# A job that is requeued waits for as long as its credential holds.
AuthInfo=socket=$folder/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n/slurmd.pid
SlurmdSpoolDir=$folder/%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
JobRequeue=1
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.9.1 Port=17001 CPUs=16 RealMemory=16000
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.9.2 Port=17002 CPUs=16 RealMemory=16000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4
CONF
export SLURM_CONF=$folder/slurm.conf
runuser -u munge -- munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
chmod 711 "$folder/munge"
slurmctld
for node in n1 n2; do slurmd -N "$node"; done
for _ in $(seq 60); do
  [ "$(sinfo -h -N -o %T | grep -c idle)" = 2 ] && exit 0
  sleep 0.5
done
sinfo -N
echo "the nodes did not become idle; see $folder/*.log" >&2
exit 1
