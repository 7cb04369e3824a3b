#!/usr/bin/env bash
# Compile engine.in to engine.txt again.
set -euo pipefail
cd "$(dirname "$0")"

# What is never imported is left out here as in requirements/run.txt; SGLang's own pins hold, and what its server imports stays.
unused=$(mktemp)
trap 'rm -f "$unused"' EXIT
grep "python_version < '3'" ../../requirements/overrides.txt | grep -vE '^(jsonschema|python-multipart|soundfile) ' >"$unused"
../../.venv/bin/uv pip compile --quiet --override "$unused" --python ../../.venv/bin/python --no-emit-index-url --no-annotate \
  --custom-compile-command "tests/environments/compile.sh" --output-file engine.txt engine.in
