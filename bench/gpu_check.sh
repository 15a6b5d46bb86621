#!/usr/bin/env bash
# What a machine with a GPU must show, in one call, without a network: the wheel installs, placement keeps every bit on
# the device, the I/O engine works on this kernel, and the copy rates are what the hardware gives.
#
#     bench/gpu_check.sh WHEELS [REPORT]
#
# WHEELS is a directory with this project's wheel (make wheel) and wheels of whatever the machine's Python lacks; see
# what is missing from the first lines printed. REPORT, if given, receives all output. Needs torch with CUDA there.
# Swap files go to TIERING_CHECK_DIR, or else to the first usual directory whose file system takes direct I/O.
#
# A part that fails does not stop the others; the table at the end says which did. All parts together end in 9 minutes.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=$(cd "${1:?usage: gpu_check.sh WHEELS [REPORT]}" && pwd) || exit
if [ -n "${2:-}" ]; then
    exec > >(tee "$2") 2>&1
fi

takes_direct_io() {
    [ "$(stat -f -c %T "$1")" != tmpfs ] && python3 - "$1" <<'PYTHON'
import os, sys
os.close(os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600))
PYTHON
}
disk=
for candidate in ${TIERING_CHECK_DIR:-/tmp /var/tmp "$HOME" "$repository"}; do
    takes_direct_io "$candidate" && disk=$candidate && break
done
if [ -z "$disk" ]; then
    echo "gpu_check: no directory takes direct I/O into anonymous files; name one in TIERING_CHECK_DIR" >&2
    exit 2
fi
scratch=$(mktemp -d "$disk/gpu-check-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl || exit
# The tests are taken from the repository, the packages from the wheel.
cp -r "$repository/tests" "$repository/pyproject.toml" "$scratch/"
cd "$scratch" || exit
export PYTHONPATH="$scratch/site" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

date -u '+%Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "nvidia-smi does not run here"
echo "Linux $(uname -r), $(nproc) cores, $(free -g | awk '/^Mem/ {print $2}') GiB," \
    "locked memory limit $(ulimit -l) KiB, aio-max-nr $(cat /proc/sys/fs/aio-max-nr)"
echo "swap files in $disk: $(stat -f -c %T "$disk"), $(df -h --output=avail "$disk" | tail -n 1 | tr -d ' ') free"
python3 - <<'PYTHON' || exit
import ctypes
import importlib.util
import os
import sys

needed = ("torch", "numpy", "cffi", "_cffi_backend", "pydantic", "rich", "pytest", "hypothesis", "tiering._aio")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu_check: this Python lacks {', '.join(missing)}: carry their wheels in the same directory")
import torch

from optim_cpu.kernels import instruction_set, thread_count
from tiering.aio import AioContext

print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, {os.confstr('CS_GNU_LIBC_VERSION')}")
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))  # io_uring_setup
print("io_uring_setup: " + (os.strerror(ctypes.get_errno()) if ring < 0 else "works"))
with AioContext() as aio:
    print(f"I/O engine {aio.engine}, kernels {instruction_set()} x {thread_count()}")
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no CUDA device")
PYTHON

parts=()
failed=0
part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 status began=$SECONDS verdict=good
    shift 2
    printf '\n== %s\n' "$name"
    timeout --kill-after=10 "$limit" "$@"
    status=$?
    [ $status -eq 0 ] || { verdict="FAILED ($status)" failed=1; }
    [ $status -lt 124 ] || verdict="NOT DONE after $limit s ($status)"
    parts+=("$(printf '%-28s %s, %s s' "$name" "$verdict" $((SECONDS - began)))")
}
pytest=(python3 -m pytest -q --tb=short -p no:cacheprovider -o faulthandler_timeout=60 --basetemp "$scratch/pytest")

part "the engine on the GPU" 200 "${pytest[@]}" -m gpu tests/gpu
part "I/O engine, swap space" 150 "${pytest[@]}" -m "not slow" tests/aio tests/tiering/test_storage.py
part "copy rates" 60 python3 "$repository/bench/gpu_copy.py"
if command -v fio >/dev/null; then
    # Its parts lie beside it. Status 1 says that a goal was missed, of which a quick run proves nothing.
    part "I/O rates" 100 env -u PYTHONSAFEPATH bash -c '"$@" || [ $? -eq 1 ]' _ \
        python3 "$repository/bench/bench_aio.py" --quick "$scratch"
else
    printf '\nno fio here: I/O rates are left out\n'
fi

echo
printf '%s\n' "${parts[@]}"
exit $failed
