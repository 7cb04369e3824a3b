#!/usr/bin/env bash
# Install the environments between which tests/adapters/test_two_environments.py publishes: the trainer's has this project's
# packages without SGLang, the engine's has SGLang, without Megatron and AWEX, and the torch that SGLang pins.
# A few GB the first time. Once they are there the test uses them, until `make clean`.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=build/.environments
rm -f $folder/ready
requirements/install.sh $folder/trainer run
$folder/trainer/bin/python -m pip uninstall --quiet --yes sglang torch-memory-saver
requirements/install.sh $folder/engine ../tests/environments/engine
touch $folder/ready
for side in trainer engine; do
  $folder/$side/bin/python -c "import torch; print('$side: torch', torch.__version__)"
done
