#!/bin/sh
# The whole loop of a GPU in under eight minutes, on a machine that has one: the packages, who it is, a small net and
# ResNet-50 compiled for it, compared with ONNX Runtime, and timed; then a job through the service, searched, checked,
# published, fetched and run. GPU names another one than the first. See gpu_check.py for its options.
set -eu
cd "$(dirname "$0")/.."
make --silent .venv/demo
.venv/bin/python -m pip install --quiet --no-build-isolation -e '.[cuda]'
timeout 200 .venv/bin/python benchmarks/gpu_check.py "$@"
exec timeout 240 .venv/bin/python benchmarks/demo.py --gpu "${GPU:-0}" --trials 300 --seconds 120
