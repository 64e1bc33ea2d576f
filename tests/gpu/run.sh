#!/bin/sh
# The GPU check, under 8 minutes: one CUDA worker, then two sharing the device; equal losses and weights; throughput.
# Needs neither a cluster nor a network. Without a device it says so and succeeds.
#   PYTHON=/path/to/python tests/gpu/run.sh
set -eu
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export PYTHONPATH="$PWD:$PWD/tests/gpu:$PWD/tests/train:$PWD/examples/gpt${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
exec "$PYTHON" tests/gpu/check.py "$@"
