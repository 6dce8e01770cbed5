#!/bin/bash
# 64 servers of 8 GPUs. The job saves before its time is up and goes back into the queue; so it does when a server is lost.
#   sbatch examples/slurm.sh
#SBATCH --job-name=mtjax --open-mode=append --requeue
#SBATCH --nodes=64 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=24:00:00 --signal=B:TERM@300

out=/shared/runs/8.3b

srun --kill-on-bad-exit=0 mtjax train --config gpt2-8.3b --mesh 64x8 \
    --data /shared/corpus/web_text_document --tokenizer /shared/gpt2-vocabulary --out "$out" --resume &
step=$!

# Time is nearly up: Slurm tells this script, which tells the processes (a TERM to srun would kill them).
time_is_up=
trap 'time_is_up=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

wait "$step"; code=$?
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done  # the trap ends the first wait

# 0: done, or saved in time. 2: something must be changed first. Anything else: resume.
if [[ $time_is_up || ($code -ne 0 && $code -ne 2) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
