#!/usr/bin/env bash
# Starts a weftmoe run on this machine: checks it, then starts one trainer rank a GPU. Started again with the same
# --out, it goes on from the last checkpoint there.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: run.sh baseline|bf16|fp8 [options] [block.key=value ...]

  --model DIR|NAME     Hugging Face directory, or a configuration: qwen3-30b-a3b (default), qwen3.5-35b-a3b-base,
                       qwen3.5-122b-a10b
  --data FILE|NAME     DAPO-Math-17k parquet as published, or the name of a dataset
  --length 8k|16k      token limits (8k)
  --optimizer NAME     muon (default) or adamw
  --gpus N             GPUs of each machine (8)
  --gpu-memory GB      of one GPU as it is sold, for the plan (141)
  --nodes N            machines (1); then on each of them
    --node-rank I        which one this is, from 0
    --master HOST:PORT   machine 0 (127.0.0.1:29500)
  --steps N            steps to train
  --out DIR            everything that the run writes (runs/weftmoe)
  --seed N             of data, sampling and made models
  --smoke              the tiny run: made model, of the family of --model NAME, and arithmetic; on one GPU or without
  --grace SECONDS      that the run has for ending by itself when it is interrupted (60)
  --save-grace SECONDS that it has for saving and ending when it is told to come again (240)
  --on-term end|save   what SIGTERM means: an interruption (end), or to come again, as where jobs are preempted by it
  --note-code FILE     write the exit code there, too: of several nodes' codes a scheduler gives one
  --no-doctor          do not check the machine first
  --ignore-plan        start although the plan says that the memory is not there
  --print, --dry-run   print the resolved settings, or the command, and leave

exit codes: 0 done, 1 the run failed, 2 wrong usage, 3 the doctor found what would fail,
            75 told to come again (SIGUSR1): it has saved, and goes on where it is started again,
            200 a rank, its engine or a peer was lost after the first step had begun: started again, the run goes on
            from its newest checkpoint; 130 and 143 interrupted

An option's value may follow `=`, too: --out=DIR.
TEXT
}

readonly EXIT_USAGE=2 EXIT_DOCTOR=3 EXIT_AGAIN=75

fail_usage() {
  printf 'run.sh: %s (run.sh --help)\n' "$1" >&2
  exit "$EXIT_USAGE"
}

# A shell expands `~` at the beginning of a word only, and not in `out=~/run`.
at_home() {
  if [[ "$1" =~ ^~(/|$) ]]; then
    printf '%s' "$HOME${1:1}"
  else
    printf '%s' "$1"
  fi
}

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd -- "$here/../.." && pwd)"
python="${PYTHON:-python3}"
if [[ -z "${PYTHON:-}" && -x "$root/.venv/bin/python" ]]; then
  python="$root/.venv/bin/python"
fi
# In a checkout the packages lie beside this script, installed or not.
if [[ -d "$root/weftpub" && -d "$root/kernels" ]]; then
  export PYTHONPATH="$root:$root/kernels:$root/adapters:$root/examples${PYTHONPATH:+:$PYTHONPATH}"
fi

case "${1:-}" in
  baseline | bf16 | fp8) variant="$1" ;;
  -h | --help)
    usage
    exit 0
    ;;
  '') fail_usage 'the variant is missing: baseline, bf16 or fp8' ;;
  *) fail_usage "unknown variant '$1'" ;;
esac
shift

launch=("$variant")
doctor=(--variant "$variant" --out runs/weftmoe)
check=1
starts=1
gpus_given=0
smoke=0
grace=60
save_grace=240
on_term=end
code_file=''
while (($#)); do
  if [[ "$1" == --*=* ]]; then
    set -- "${1%%=*}" "${1#*=}" "${@:2}"
  fi
  case "$1" in
    --model | --data | --length | --optimizer | --nodes | --node-rank | --master | --gpus | --gpu-memory | --steps | --out | --seed)
      [[ $# -ge 2 ]] || fail_usage "$1 needs a value"
      launch+=("$1" "$2")
      case "$1" in
        --gpus)
          doctor+=(--gpus "$2")
          gpus_given=1
          ;;
        --out) doctor+=(--out "$(at_home "$2")") ;;
        --nodes | --model) doctor+=("$1" "$2") ;;
      esac
      shift 2
      ;;
    --grace)
      [[ "${2:-}" =~ ^[0-9]+$ ]] || fail_usage '--grace needs a number of seconds'
      grace="$2"
      shift 2
      ;;
    --save-grace)
      [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail_usage '--save-grace needs a number of seconds'
      save_grace="$2"
      launch+=("checkpoint.grace=$2")
      shift 2
      ;;
    --on-term)
      [[ "${2:-}" == end || "${2:-}" == save ]] || fail_usage "--on-term needs 'end' or 'save'"
      on_term="$2"
      shift 2
      ;;
    --note-code)
      [[ $# -ge 2 ]] || fail_usage '--note-code needs a file'
      code_file="$2"
      shift 2
      ;;
    --smoke)
      launch+=(--smoke)
      smoke=1
      shift
      ;;
    --print | --dry-run)
      launch+=("$1")
      starts=0
      shift
      ;;
    --ignore-plan)
      launch+=("$1")
      shift
      ;;
    --no-doctor)
      check=0
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *=*)
      launch+=("$1")
      case "$1" in
        cluster.gpus=*)
          doctor+=(--gpus "${1#*=}")
          gpus_given=1
          ;;
        cluster.nodes=*) doctor+=(--nodes "${1#*=}") ;;
        out=*) doctor+=(--out "$(at_home "${1#*=}")") ;;
        checkpoint.grace=*)
          [[ "${1#*=}" =~ ^([0-9]+)(\.[0-9]+)?$ ]] || fail_usage "$1 needs a number of seconds, such as 240"
          # Whole seconds here, and no fewer than the run has.
          save_grace="$((10#${BASH_REMATCH[1]} + (${#BASH_REMATCH[2]} > 0)))"
          ;;
      esac
      shift
      ;;
    *) fail_usage "unknown option '$1'" ;;
  esac
done
if ((!smoke && !gpus_given)); then
  doctor+=(--gpus 8) # the smoke takes whatever is there
fi

# shellcheck disable=SC2317 # called by the traps
note_code() {
  [[ -z "$code_file" ]] || printf '%s\n' "$1" >"$code_file" || true
}
trap 'note_code "$?"' EXIT

# Nothing has been started that could save.
trap 'exit "$EXIT_AGAIN"' USR1
if [[ "$on_term" == save ]]; then
  trap 'exit "$EXIT_AGAIN"' TERM
fi

if ((check && starts)); then
  "$python" -m weftpub_adapters.doctor "${doctor[@]}" || exit "$EXIT_DOCTOR"
fi

# The run gets a process group of its own, and only that group is ever signalled. Its number is that of the only process
# in the background, from the moment that there is one.
code=0
# Whether a process of the group still runs. A dead one that nobody has reaped yet, as in a container whose first process
# reaps late, would answer `kill -0`.
# shellcheck disable=SC2317 # called by the traps
group_runs() {
  local file line state pgrp group="${!:-}"
  for file in /proc/[0-9]*/stat; do
    { read -r line <"$file"; } 2>/dev/null || continue
    read -r state _ pgrp _ <<<"${line##*) }"
    if [[ "$pgrp" == "$group" && "$state" != Z ]]; then
      return 0
    fi
  done
  return 1
}

# shellcheck disable=SC2317 # called by the traps
end_group() {
  local group="${!:-}"
  [[ -n "$group" ]] || return 0
  kill -s TERM -- "-$group" 2>/dev/null || return 0
  local end=$((SECONDS + grace))
  while group_runs; do
    if ((SECONDS >= end)); then
      kill -s KILL -- "-$group" 2>/dev/null || true
      break
    fi
    sleep 0.2
  done
}

# shellcheck disable=SC2317 # called by the traps
stop() {
  trap '' INT TERM USR1
  code="$1"
  end_group
  exit "$code"
}

# Whether the first process of the group still runs.
# shellcheck disable=SC2317 # called by the traps
leader_runs() {
  local line state pgrp group="${!:-}"
  [[ -n "$group" ]] || return 1
  { read -r line <"/proc/$group/stat"; } 2>/dev/null || return 1
  read -r state _ pgrp _ <<<"${line##*) }"
  [[ "$pgrp" == "$group" && "$state" != Z ]]
}

# The run ends by itself, and its own code says how. An interruption meanwhile is still one.
# shellcheck disable=SC2317 # called by the traps
come_again() {
  trap '' USR1
  if [[ "$on_term" == save ]]; then
    trap '' TERM
  fi
  local group="${!:-}"
  [[ -n "$group" ]] || exit "$EXIT_AGAIN" # nothing has been started that could save
  local end=$((SECONDS + save_grace))
  while leader_runs; do
    if ((SECONDS >= end)); then
      printf 'run.sh: the run did not end within %s s; it goes on from an older checkpoint\n' "$save_grace" >&2
      stop "$EXIT_AGAIN"
    fi
    kill -s USR1 "$group" 2>/dev/null || true
    sleep 0.5 || true
  done
  code=0
  wait "$group" || code=$?
  exit "$code"
}

# Before the run is started, so that no moment is left in which a signal ends this script and not the run.
trap 'stop 130' INT
if [[ "$on_term" == save ]]; then
  trap come_again TERM
else
  trap 'stop 143' TERM
fi
# Whatever else ends this script ends the run, too.
# shellcheck disable=SC2154 # assigned in the trap
trap 'last=$?; end_group; note_code "$last"' EXIT

# The run's first process hears of SIGUSR1 once it can pass it on; until then it ignores the signal, which is said again.
trap '' USR1
set -m
"$python" -m weftmoe.launch "${launch[@]}" </dev/null &
trap come_again USR1
set +m

wait "$!" || code=$?
exit "$code"
