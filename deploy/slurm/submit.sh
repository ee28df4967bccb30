#!/usr/bin/env bash
# Submit all roles of a run: submit.sh CONFIG [--set KEY=VALUE ...]. Prints the role and the job id of each, one a line.
#
# Numbers: FOREBAY_ROLLOUTS (1), FOREBAY_REWARDS (1). Options of sbatch for one role: COORDINATOR_SBATCH, ROLLOUT_SBATCH, REWARD_SBATCH,
# LEARNER_SBATCH, split at spaces; for all roles Slurm has variables of its own, such as SBATCH_PARTITION and SBATCH_ACCOUNT.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FOREBAY_CONFIG=$(realpath -e "$1")
shift
FOREBAY_HOME=${FOREBAY_HOME:-$(dirname "$(dirname "$here")")}
logs=${FOREBAY_LOGS:-$FOREBAY_HOME/runs/slurm}
export FOREBAY_HOME FOREBAY_CONFIG
cd "$FOREBAY_HOME"

# All that can be seen to be wrong is said now, and not by four jobs later. [up] is about one machine without Slurm: left out.
.venv/bin/forebay check "$FOREBAY_CONFIG" --set coordinator.insecure=true "$@" --set 'up={learner_procs=0}' >&2
mkdir -p "$logs"

jobs=()
trap 'echo "forebay: not all roles could be submitted; cancelling those that were" >&2; [ ${#jobs[@]} = 0 ] || scancel "${jobs[@]}"' ERR
set -E # the trap in functions too

# submit ROLE OPTIONS-OF-SBATCH...: sets `job`.
submit() {
  local role=$1 extra variable=${1^^}_SBATCH
  shift
  read -ra extra <<< "${!variable:-}"
  job=$(sbatch --parsable --export=ALL --output="$logs/%x-%j.out" "$@" "${extra[@]}" "$here/$role.sbatch" "${arguments[@]}")
  job=${job%%;*} # the name of a cluster may follow
  jobs+=("$job")
  echo "$role $job"
}

arguments=("$@")
submit coordinator
export FOREBAY_COORDINATOR_JOB=$job
# `after`: once the coordinator's job has started, it has a node, and so an address. A node waits run.join_timeout_s for its answer.
submit learner --dependency="after:$FOREBAY_COORDINATOR_JOB"
submit rollout --dependency="after:$FOREBAY_COORDINATOR_JOB" --array="0-$((${FOREBAY_ROLLOUTS:-1} - 1))"
submit reward --dependency="after:$FOREBAY_COORDINATOR_JOB" --array="0-$((${FOREBAY_REWARDS:-1} - 1))"
