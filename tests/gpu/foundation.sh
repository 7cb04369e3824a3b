#!/usr/bin/env bash
# Everything that the foundation claims on a GPU, in one run: bytes, speed, staging, the GPU tests and the main job.
#
#   tests/gpu/foundation.sh OUT [SECTION ...]      sections: verify quantize transpose staging tests demo (default: all)
#
# Runs in the environment as it is ($PYTHON, default python3): torch, triton, megatron-core, sglang, awex, and transformer-engine
# for its rows. OUT gets one JSON or log per section and summary.txt; the exit status is 1 if any section failed.
# `python tests/gpu/foundation_page.py docs/results/PAGE.md OUT` makes the dated results page of it.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=${1:?folder for the results}; shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
sections=("$@"); [ $# -gt 0 ] || sections=(verify quantize transpose staging tests demo)
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/adapters:$PWD/examples${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
commit=${COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)} # COMMIT names it where there is no git
status=0
: > "$out/summary.txt"

section() { # NAME COMMAND...: run, keep the log, note the outcome
  local name=$1 started=$SECONDS code=0; shift
  "$@" > "$out/$name.log" 2>&1 || code=$?
  tail -n 12 "$out/$name.log"
  echo "$name: exit $code after $((SECONDS - started)) s" | tee -a "$out/summary.txt"
  [ "$code" = 0 ] || status=1
}

demo() { make --no-print-directory demo NO_INSTALL=1 PYTHON="$python" DEMO_ARGS="--out $out/$1 ${*:2}"; }

for name in "${sections[@]}"; do
  case $name in
    verify) section verify "$python" -m weftpub_kernels.bench.verify --out "$out/verify.json" --commit "$commit" ;;
    quantize) section quantize "$python" -m weftpub_kernels.bench.quantize --out "$out/quantize.json" --commit "$commit" ;;
    transpose) section transpose "$python" -m weftpub_kernels.bench.transpose --out "$out/transpose.json" --commit "$commit" ;;
    staging) section staging "$python" -m weftpub.staging.bench --out "$out/staging.json" ;;
    tests) section tests "$python" -m pytest -q -p no:cacheprovider --require-gpu -m "gpu and not multigpu" tests ;;
    demo)
      section demo-muon demo demo-muon --optimizer muon
      section demo-adamw demo demo-adamw --optimizer adamw ;;
    *) echo "no section is named $name" >&2; exit 2 ;;
  esac
done
exit $status
