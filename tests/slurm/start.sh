#!/bin/bash
# A real Slurm on this machine alone: munged, slurmctld and slurmd from Debian packages, on loopback, without systemd.
#   tests/slurm/start.sh FOLDER [CPUS]     everything it writes is in FOLDER; `. FOLDER/env.sh` makes a shell use it
# Exit code 77: it cannot be done here, and why is on standard output. Needs root. tests/slurm/stop.sh FOLDER ends it.
set -euo pipefail
H=$1; CPUS=${2:-4}
HOST=$(hostname -s); MEM=$(awk '/MemTotal/{print int($2/1024*0.9)}' /proc/meminfo)
skip() { echo "$*"; exit 77; }
wait_for() { for ((i = 0; i < 400; i++)); do timeout 5 "$@" >/dev/null 2>&1 && return 0; sleep 0.05; done; echo "gave up: $*" >&2; return 1; }
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

[ "$(id -u)" = 0 ] || skip "a Slurm of one's own needs root"
missing=()
for package in slurmctld slurmd slurm-client munge; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
((${#missing[@]} == 0)) || skip "not installed: ${missing[*]} (apt-get install -y --no-install-recommends ${missing[*]})"

mkdir -p "$H"/{etc,run,log,state,spool,munge}
chmod 755 "$H" "$H"/{etc,run,log,state,spool,munge}
dd if=/dev/urandom of="$H/munge/munge.key" bs=1024 count=1 status=none
chown -R munge:munge "$H/munge" "$H/run"
chmod 400 "$H/munge/munge.key"
cat >"$H/etc/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its old credential has expired
AuthInfo=socket=$H/run/munge.socket,cred_expire=5
StateSaveLocation=$H/state
SlurmdSpoolDir=$H/spool
SlurmctldPidFile=$H/run/slurmctld.pid
SlurmdPidFile=$H/run/slurmd.pid
SlurmctldLogFile=$H/log/slurmctld.log
SlurmdLogFile=$H/log/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((MEM / CPUS))
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
MinJobAge=3600
KillWait=30
CompleteWait=0
AccountingStorageType=accounting_storage/none
NodeName=$HOST NodeAddr=127.0.0.1 Port=$(free_port) CPUs=$CPUS RealMemory=$MEM State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
export SLURM_CONF="$H/etc/slurm.conf"
echo "export SLURM_CONF=$SLURM_CONF" >"$H/env.sh"

setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --key-file="$H/munge/munge.key" \
  --socket="$H/run/munge.socket" --pid-file="$H/run/munged.pid" --seed-file="$H/munge/munge.seed" \
  --log-file="$H/munge/munged.log"
wait_for munge -n -S "$H/run/munge.socket"
/usr/sbin/slurmctld -f "$SLURM_CONF"
wait_for scontrol ping
/usr/sbin/slurmd -f "$SLURM_CONF" -N "$HOST"
wait_for bash -c 'sinfo -h -N -p main -o %T | grep -qE "^(idle|mixed|allocated)$"' || { sinfo -N -l; sinfo -R; exit 1; }
