#!/usr/bin/env bash
# Make the virtual environment VENV (default .venv) with the pinned packages of the named requirement files (run, dev) and
# this project in editable form. Needs Python 3.12, or uv, somewhere on PATH. Safe to run again: it only adds what is missing.
#
#   requirements/install.sh .venv run dev
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
shift || true
sets=("$@")
[ ${#sets[@]} -gt 0 ] || sets=(run)

is_312() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

make_venv() {
  local python
  for python in ${PYTHON:-} python3.12 python3 python; do
    if is_312 "$python" && "$python" -m venv "$venv" 2>/dev/null && [ -x "$venv/bin/pip" ]; then
      return
    fi
    rm -rf "$venv"
  done
  if command -v uv >/dev/null 2>&1; then # a Python without ensurepip, or none at all
    uv venv --quiet --seed --python 3.12 "$venv"
    return
  fi
  echo "weftpub needs Python 3.12 (with its venv module) or uv on PATH; neither was found. Name one with: make PYTHON=/path/to/python3.12" >&2
  exit 1
}

is_312 "$venv/bin/python" || { rm -rf "$venv"; make_venv; }
python=$venv/bin/python

# uv installs the frozen set in seconds; where it cannot be had, pip does the same more slowly.
if ! [ -x "$venv/bin/uv" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' requirements/dev.txt)" || echo "uv could not be installed; going on with pip" >&2
fi
if [ -x "$venv/bin/uv" ]; then
  install=("$venv/bin/uv" pip install --quiet --python "$python")
else
  install=("$python" -m pip install --quiet --disable-pip-version-check)
fi

# --no-deps: the files are complete, and SGLang's and Megatron-Bridge's own pins do not hold here (overrides.txt).
files=()
for name in "${sets[@]}"; do
  files+=(-r "requirements/$name.txt")
done
"${install[@]}" --no-deps "${files[@]}"
# The build backend comes from dev.txt, so an editable install downloads nothing that is not pinned.
"${install[@]}" --no-deps $(grep -E '^(hatchling|editables|packaging|pathspec|pluggy|trove-classifiers|tomlkit)==' requirements/run.txt requirements/dev.txt -h | sort -u)
"${install[@]}" --no-deps --no-build-isolation --editable .
