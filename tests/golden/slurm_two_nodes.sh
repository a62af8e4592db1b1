#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --requeue
#SBATCH --job-name=grpo-exp-precision
#SBATCH --array=0-5
#SBATCH --output=/scratch/runs/.slurm/0123abcd/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --chdir=/scratch/runs/.slurm/0123abcd
#SBATCH --signal=B:USR2@120
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:h100:4

export PYTHONPATH=/scratch/runs/.slurm/code-0123456789ab${PYTHONPATH:+:$PYTHONPATH}
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" /scratch/runs/.slurm/0123abcd/runs.txt)
export run MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))

# USR2 comes before a time limit or a preemption: the run saves a checkpoint, and the job goes back into the queue.
again=
trap 'again=1; kill -USR2 "$pid" 2>/dev/null' USR2
trap : TERM  # reaches the run itself; the shell stays to hand on its exit code
srun --kill-on-bad-exit=1 --cpus-per-task=16 bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec apptainer exec --nv image.sif python3 -P -m grpo_exp.run "$run" --resume' >>"$run/logs/run.log" 2>&1 &
pid=$!
while true; do
  wait "$pid"
  code=$?
  kill -0 "$pid" 2>/dev/null || break
done
if [ -n "$again" ] && [ "$code" -ge 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" && sleep 60  # the id of the last task alone means all
fi
exit "$code"
