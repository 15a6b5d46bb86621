#!/usr/bin/env bash
# What a machine with a GPU must show, in one call, without a network: the wheel installs, placement keeps every bit on
# the device, and the copy rates are what the hardware gives.
#
#     bench/gpu_check.sh WHEELS [REPORT]
#
# WHEELS is a directory with this project's wheel (make wheel) and wheels of whatever the machine's Python lacks; see
# what is missing from the first lines printed. REPORT, if given, receives all output. Needs torch with CUDA there.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=$(cd "${1:?usage: gpu_check.sh WHEELS [REPORT]}" && pwd)
if [ -n "${2:-}" ]; then
    exec > >(tee "$2") 2>&1
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

date -u '+%Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "nvidia-smi does not run here"
python3 --version
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl
export PYTHONPATH="$scratch/site" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
python3 - <<'PYTHON'
import importlib.util
import sys

needed = ("torch", "numpy", "cffi", "_cffi_backend", "pydantic", "pydantic_core", "rich", "pytest", "tiering._aio")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu_check: this Python lacks {', '.join(missing)}: carry their wheels in the same directory")
import torch

from optim_cpu.kernels import instruction_set, thread_count

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, kernels {instruction_set()} x {thread_count()}")
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no CUDA device")
PYTHON

# The tests are taken from the repository, the packages from the wheel.
cp -r "$repository/tests" "$repository/pyproject.toml" "$scratch/"
cd "$scratch"
CUBLAS_WORKSPACE_CONFIG=:4096:8 timeout 200 python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu
timeout 60 python3 "$repository/bench/gpu_copy.py"
