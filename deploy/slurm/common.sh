# shellcheck shell=bash
# Sourced by the *.sbatch files: where things are, and how a job finds the coordinator. See README.md for the variables.
set -euo pipefail

die() { echo "forebay: $*" >&2; exit 2; }

FOREBAY_HOME=${FOREBAY_HOME:-$SLURM_SUBMIT_DIR}
FOREBAY_PORT=${FOREBAY_PORT:-5710}
[ -n "${FOREBAY_CONFIG:-}" ] || die "FOREBAY_CONFIG must name the run's config (submit.sh sets it)."
cd "$FOREBAY_HOME"
[ -x .venv/bin/forebay ] || die "no .venv/bin/forebay in $FOREBAY_HOME on $(hostname): FOREBAY_HOME must be the checkout, on a file system of all nodes."

# srun takes no --cpus-per-task from its job since Slurm 22.05.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# The address under which Slurm's own daemons reach the node $1. Unlike the node's name, it needs no name service.
node_address() {
  local address
  address=$(scontrol --oneliner show node "$1" | grep -oP '(?<= NodeAddr=)\S+') || die "Slurm knows no address of node $1."
  echo "$address"
}

# tcp://HOST:PORT of the coordinator: FOREBAY_ADDRESS, or the node that runs the job FOREBAY_COORDINATOR_JOB.
coordinator_address() {
  local node host
  if [ -n "${FOREBAY_ADDRESS:-}" ]; then echo "$FOREBAY_ADDRESS"; return; fi
  [ -n "${FOREBAY_COORDINATOR_JOB:-}" ] || die "FOREBAY_ADDRESS (tcp://HOST:PORT) or FOREBAY_COORDINATOR_JOB must say where the coordinator is."
  node=$(scontrol --oneliner show job "$FOREBAY_COORDINATOR_JOB" | grep -oP '(?<= BatchHost=)\S+') \
    || die "the coordinator's job $FOREBAY_COORDINATOR_JOB runs on no node."
  host=$(node_address "$node")
  echo "tcp://$host:$FOREBAY_PORT"
}

# Become the role $1 with the arguments that follow, in a job step: Slurm sends SIGTERM to steps, and the role's exit code is the job's.
run_role() {
  local role=$1
  shift
  exec srun --kill-on-bad-exit=1 .venv/bin/forebay "$role" --config "$FOREBAY_CONFIG" "$@"
}
