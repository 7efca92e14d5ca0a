#!/bin/bash
# A psdist run as one Slurm job: submit this file with sbatch. docs/slurm.md describes it.
#SBATCH --job-name=@JOB_NAME@
#SBATCH --nodes=@ALL_NODES@
#SBATCH --ntasks-per-node=1
@OPTIONS@
# Slurm signals this script before the time limit or a preemption. The run saves its last step, and the job is requeued.
#SBATCH --signal=B:TERM@@NOTICE@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u
export PATH=@BIN@:$PATH # has psdist, on every node

# The run has the same name after a requeue, and so it resumes from its newest snapshot.
export PSDIST_RUN_ID=@RUN_ID@
storage=@STORAGE@ # a directory that all nodes share, or a bucket
attempt=${SLURM_RESTART_COUNT:-0}
# The scheduler's store, on the first node. It is of this attempt only: the next one resumes from a snapshot.
scratch=$(mktemp -d) || exit 1
cd "$SLURM_SUBMIT_DIR" || exit 1

# --- addresses ----------------------------------------------------------------------------------------------------------

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
join() { local IFS=,; echo "$*"; }

port=@PORT@ # differs between jobs that share a node
host=$(address_of "${nodes[0]}")
everywhere=0.0.0.0
[[ $host != *:* ]] || { host="[$host]" everywhere=::; } # IPv6
PSDIST_SCHEDULER=$host:$port
MASTER_ADDR=$(address_of "${nodes[@SERVICE_NODES@]}") # for scripts that use torch.distributed, too
MASTER_PORT=$((port + 1))
export PSDIST_SCHEDULER MASTER_ADDR MASTER_PORT
server_nodes=$(join "${nodes[@]:0:@SERVER_NODES@}")
worker_nodes=$(join "${nodes[@]:@SERVICE_NODES@}")

# Tokens keep other users of the cluster out of the run. Each step gets one of its role, and the scheduler the run's own,
# which may do everything. Nothing is encrypted: the network must be private.
PSDIST_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PSDIST_TOKEN PSDIST_INSECURE=1
server_token=$(psdist token create --role server) && worker_token=$(psdist token create --role worker) || exit 1
state=$SLURM_SUBMIT_DIR/.psdist/$SLURM_JOB_ID
mkdir -p "$state" && chmod 700 "$state" && rm -f "$state/token" \
  && psdist token create --role admin --out "$state/token" || exit 1
echo "psdist status --scheduler $PSDIST_SCHEDULER --insecure --token-file $state/token"

# --- scheduler and servers ----------------------------------------------------------------------------------------------

# Slurm signals all steps of a job together. Scheduler and servers ignore SIGTERM: they have to outlive the workers,
# whose last step they save. They are restarted after the exit statuses for which docs/errors.md says so.
keep='
trap "" TERM
for again in {1..10}; do
  "${@:2}"; status=$?
  [[ $status =~ ^($1)$ ]] || exit $status
  sleep 1
done
exit $status'

# All steps share the nodes' processors and memory. GPUs are left to the workers.
service=(srun --overlap --overcommit --mem=0 --cpu-bind=none --kill-on-bad-exit=0 --gres=none)

"${service[@]}" --job-name=scheduler --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
  bash -c "$keep" scheduler '@SCHEDULER_RESTARTS@' \
  psdist-scheduler --host "$everywhere" --port "$port" --insecure \
  --min-workers @WORKERS@ --min-servers @SERVERS@ --replicas @REPLICAS@ --start-timeout @START_TIMEOUT@ \
  --storage-path "$storage" --save-interval @SAVE_INTERVAL@ \
  --store "$scratch/scheduler.sqlite" &
scheduler=$!

PSDIST_TOKEN=$server_token "${service[@]}" --job-name=servers --nodes=@SERVER_NODES@ --ntasks=@SERVERS@ --nodelist="$server_nodes" \
  bash -c "$keep" servers '@SERVER_RESTARTS@' \
  psdist-server --host "$everywhere" --insecure --start-timeout @START_TIMEOUT@ &

# --- workers ------------------------------------------------------------------------------------------------------------

# One agent per node. Its rank is SLURM_PROCID, and the number of nodes SLURM_STEP_NUM_TASKS.
PSDIST_TOKEN=$worker_token srun --overlap --mem=0 --cpu-bind=none --kill-on-bad-exit=0 --job-name=workers \
  --nodes=@NODES@ --ntasks=@NODES@ --nodelist="$worker_nodes" \
  psdist-worker --nproc-per-node @PROCESSES@ --start-timeout @START_TIMEOUT@ --stop-timeout @NOTICE@ \
  -- @COMMAND@ &
workers=$!

signal_step() { # signal_step SIGNAL NAME
  local step
  step=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v name="$2" '$2 == name { print $1 }')
  [ -z "$step" ] || scancel --signal="$1" "$step" 2> /dev/null # the step may end by itself meanwhile
}

# True if Slurm is about to end this job: the time limit is near, or the job is preempted.
is_cut_off() {
  local job ends
  job=$(scontrol show job "$SLURM_JOB_ID")
  [[ $job =~ PreemptTime=[0-9] ]] && return 0
  ends=$(date -d "$(sed -n 's/.* EndTime=\([^ ]*\).*/\1/p' <<< "$job")" +%s 2> /dev/null) || return 1
  (( ends - $(date +%s) <= @NOTICE@ + 90 ))
}

requeues=
trap 'is_cut_off && requeues=1; signal_step TERM workers' TERM

wait "$workers"; status=$?
while kill -0 "$workers" 2> /dev/null; do wait "$workers"; status=$?; done # a signal ends wait, too
trap '' TERM

# --- the end ------------------------------------------------------------------------------------------------------------

# The scheduler saves what is not saved yet. After that the servers have nothing to lose.
signal_step INT scheduler
wait "$scheduler"
signal_step KILL servers
rm -rf "$state" "$scratch"

# A run that lost its servers, or its storage for a while, may resume. docs/errors.md lists these exit statuses.
[[ $status =~ ^(@REQUEUES@)$ ]] && [ "$attempt" -lt @REQUEUES_MAX@ ] && requeues=1
if [ -n "$requeues" ] && [ "$status" -ne 0 ]; then
  echo "psdist: exit status $status: the job is requeued, and resumes from its newest snapshot"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
