#!/bin/sh
# The whole loop of a GPU in under eight minutes, on a machine that has one: the packages, who it is, a small net and
# ResNet-50 compiled for it, compared with ONNX Runtime, and timed. See gpu_check.py for its options.
set -eu
cd "$(dirname "$0")/.."
make --silent .venv/demo
.venv/bin/python -m pip install --quiet --no-build-isolation -e '.[cuda]'
exec timeout 420 .venv/bin/python benchmarks/gpu_check.py "$@"
