#!/bin/bash
# Ends what start.sh FOLDER started, jobs first, each daemon by the pid in its own file.
set -uo pipefail
H=$1
export SLURM_CONF="$H/etc/slurm.conf"
jobs=$(squeue -h -o %A 2>/dev/null | sort -u)
if [ -n "$jobs" ]; then  # the processes of a job outlive slurmd
  scancel --full --signal=KILL $jobs 2>/dev/null
  scancel $jobs
  for ((i = 0; i < 400; i++)); do
    [ -z "$(squeue -h -t R,CG,S 2>/dev/null)" ] && break
    sleep 0.1
  done
fi
for name in slurmd slurmctld munged; do
  pid=$(cat "$H/run/$name.pid" 2>/dev/null) || continue
  grep -qa "$name" "/proc/$pid/cmdline" 2>/dev/null || continue
  kill -TERM "$pid"
  for ((i = 0; i < 200; i++)); do
    kill -0 "$pid" 2>/dev/null || break
    grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null && break
    sleep 0.05
  done
  kill -KILL "$pid" 2>/dev/null
done
exit 0
