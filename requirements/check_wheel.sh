#!/usr/bin/env bash
# Install a wheel into a new environment, with the dependencies that the wheel itself declares, and import its packages there.
#
#   requirements/check_wheel.sh PYTHON WHEEL
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
wheel=$(realpath "$2")
constraints=$(realpath requirements/run.txt)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/weftpub-wheel.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

uv=$(dirname "$python")/uv
if [ -x "$uv" ]; then
  "$uv" venv --quiet --python "$python" "$scratch/venv"
  "$uv" pip install --quiet --python "$scratch/venv/bin/python" --constraint "$constraints" "$wheel"
else
  "$python" -m venv "$scratch/venv"
  "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$wheel"
fi

cd "$scratch" # away from the sources: what imports now came out of the wheel
"$scratch/venv/bin/python" - <<'PYTHON'
import importlib
import sys
from importlib.resources import files

for name in ("weftpub_kernels", "weftpub", "weftpub_adapters", "weftpub_demo", "weftmoe"):
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), f"{name} was imported from {module.__file__}, not from the wheel"
text = files("weftpub_demo").joinpath("data", "text.txt").read_text(encoding="utf-8")
assert len(text) > 10_000, "the shipped text is missing from the wheel"
print("wheel: weftpub_kernels, weftpub, weftpub_adapters, weftpub_demo and weftmoe import")
PYTHON
"$scratch/venv/bin/weftpub" --version
"$scratch/venv/bin/weftpub" demo --help >/dev/null
"$scratch/venv/bin/weftpub" doctor --help >/dev/null
"$scratch/venv/bin/weftpub" plan --help >/dev/null
"$scratch/venv/bin/weftpub" report --help >/dev/null
