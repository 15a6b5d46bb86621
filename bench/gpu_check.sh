#!/usr/bin/env bash
# What a machine with a GPU must show, in one call, without a network: the wheel installs, placement keeps every bit on
# the device, no copy is used too early, the I/O engine works on this kernel, copies run at the hardware's rate, and a
# step takes no longer than it has to.
#
#     make gpu-carry                                  # where there is a network; then copy the repository, and there:
#     bench/gpu_check.sh dist/gpu [REPORT [PART...]]
#
# dist/gpu has this project's wheel, and wheels of what the machine's python3 may lack beside torch with CUDA. A torch on
# PYTHONPATH is used before the machine's. REPORT receives all output; what bench_gpu_step.py finds is put beside it, as
# REPORT-step.md and .json. Swap files go to TIERING_CHECK_DIR, or else to the first usual directory whose file system
# takes direct I/O. The parts, all of them unless some are named:
#
#     tests      tests/gpu, each file in a process of its own: an error of CUDA would stay with the process
#     sanitizer  tests/gpu/stress.py under compute-sanitizer, where there is one: accesses, and races of streams
#     io         tests of the I/O engine, beside the tests above: they need no GPU
#     copies     bench/gpu_copy.py
#     step       bench/bench_gpu_step.py, beside DeepSpeed if it is there and compiles
#     disk       bench/bench_aio.py --quick, where there is fio
#
# A part that fails, or takes longer than it may, does not stop the others; the table at the end says which did. All of
# them together end within TIERING_CHECK_SECONDS, or 9 and a half minutes.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=$(cd "${1:?usage: gpu_check.sh WHEELS [REPORT [PART...]]}" && pwd) || exit
report=${2:+$(realpath "$2")}
all="tests sanitizer io copies step disk"
chosen=${*:3}
for name in $chosen; do
    [[ " $all " == *" $name "* ]] || { echo "gpu_check: no part is called $name; there are: $all" >&2; exit 2; }
done
if [ -n "$report" ]; then
    exec > >(tee "$report") 2>&1
fi
most=${TIERING_CHECK_SECONDS:-570}

takes_direct_io() {
    [ -d "$1" ] && [ "$(stat -f -c %T "$1")" != tmpfs ] && python3 - "$1" 2>/dev/null <<'PYTHON'
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
started=() # process groups of what runs beside the parts
end() {
    for group in "${started[@]}"; do
        kill -TERM -- "-$group" 2>/dev/null
    done
    rm -rf "$scratch"
}
trap end EXIT
trap 'exit 130' INT TERM
python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target "$scratch/site" "$wheels"/*.whl || exit
# The tests are taken from the repository, the packages from the wheels.
cp -r "$repository/tests" "$repository/pyproject.toml" "$scratch/"
cd "$scratch" || exit
# Plug-ins that the machine's pytest finds are not this suite's: their warnings would be errors.
export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PATH="$scratch/site/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 \
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 TORCH_EXTENSIONS_DIR="$scratch/extensions"

date -u '+%Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "nvidia-smi does not run here"
echo "Linux $(uname -r), $(nproc) cores, $(free -g | awk '/^Mem/ {print $2}') GiB," \
    "locked memory limit $(ulimit -l) KiB, aio-max-nr $(cat /proc/sys/fs/aio-max-nr)"
echo "swap files in $disk: $(stat -f -c %T "$disk"), $(df -h --output=avail "$disk" | tail -n 1 | tr -d ' ') free"
python3 - <<'PYTHON' || exit
import ctypes
import importlib.metadata
import os
import re
import sys

def absent(requirements):
    """Distributions that are not installed."""
    for name in (re.split(r"[^\w.-]", one)[0] for one in requirements if "extra ==" not in one):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name

missing = list(absent([*importlib.metadata.requires("tiering"), "pytest", "hypothesis"]))
if missing:
    sys.exit(f"gpu_check: this Python lacks {', '.join(missing)}: make gpu-carry ARGS='{' '.join(missing)}'")
import torch

from optim_cpu.kernels import instruction_set, thread_count
from tiering.storage.aio import AioContext

libc = ctypes.CDLL(None, use_errno=True)
glibc = os.confstr("CS_GNU_LIBC_VERSION")
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, {glibc}")
ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))  # io_uring_setup
print("io_uring_setup: " + (os.strerror(ctypes.get_errno()) if ring < 0 else "works"))
with AioContext() as aio:
    print(f"I/O engine {aio.engine}, kernels {instruction_set()} x {thread_count()}")
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no CUDA device, and nothing here can be shown without one")
PYTHON

parts=()
failed=0
wanted() { [ -z "$chosen" ] || [[ " $chosen " == *" $1 "* ]]; }
left() { # SECONDS: no more than there are
    local rest=$((most - SECONDS))
    echo $(($1 < rest ? $1 : rest))
}
note() { # NAME BEGAN LIMIT STATUS [PEER]
    local verdict=good
    case $4 in
        0) ;;
        5) verdict="NO TEST RAN" ;;
        124 | 137) verdict="NOT DONE after $3 s" ;;
        *) verdict="FAILED ($4)" ;;
    esac
    [ "$4" -eq 0 ] || [ -n "${5:-}" ] || failed=1
    parts+=("$(printf '%-36s %s, %s s' "$1" "$verdict" $((SECONDS - $2)))")
}
part() { # NAME SECONDS COMMAND...
    local name=$1 limit began=$SECONDS
    limit=$(left "$2")
    shift 2
    printf '\n== %s\n' "$name"
    if [ "$limit" -lt 5 ]; then
        parts+=("$(printf '%-36s LEFT OUT: no time' "$name")") failed=1
        return 1
    fi
    timeout --kill-after=20 "$limit" "$@"
    local status=$?
    note "$name" "$began" "$limit" $status
    return $status
}
beside() { # NAME SECONDS COMMAND...: until finish NAME; its output waits for that
    local name=$1
    # All of it in a process group of its own, which goes when we do; its status is in a file when it has ended.
    setsid bash -c 'timeout --foreground --kill-after=10 "${@:2}"; echo $? >"$1.status"' _ "$scratch/$name" "${@:2}" \
        >"$scratch/$name.log" 2>&1 &
    started+=($!)
}
finish() { # NAME TITLE SECONDS [PEER]: wait so long for what was started beside, and show it
    local began=$SECONDS limit status
    limit=$(left "$3")
    printf '\n== %s\n' "$2"
    while [ ! -s "$scratch/$1.status" ] && [ $((SECONDS - began)) -lt "$limit" ]; do
        sleep 0.5
    done
    tail -n 150 "$scratch/$1.log"
    status=$(cat "$scratch/$1.status" 2>/dev/null || echo 124)
    note "$2" "$began" "$limit" "$status" "${4:-}"
    return "$status"
}
pytest=(python3 -m pytest -q --tb=short --maxfail=10 -p no:cacheprovider -o faulthandler_timeout=60)

if wanted io; then
    beside io 150 "${pytest[@]}" --basetemp "$scratch/pytest-io" -m "not slow" tests/aio tests/tiering/storage/test_storage.py
fi
peer=
if wanted step && python3 -c 'import deepspeed' 2>/dev/null; then
    peer=1
    beside deepspeed 180 python3 -c 'from deepspeed.ops.op_builder import CPUAdamBuilder as B; B().load(verbose=False)'
fi
if wanted tests; then
    # Four files at once: each takes seconds to start, and leaves most of the machine idle.
    rates=tests/gpu/test_device_rates.py # compares rates, and so runs alone
    mapfile -t files < <(printf '%s\n' tests/gpu/test_*.py | grep -v "$rates")
    for ((first = 0; first < ${#files[@]}; first += 4)); do
        for file in "${files[@]:first:4}"; do
            name=$(basename "$file" .py)
            beside "$name" 120 "${pytest[@]}" --basetemp "$scratch/pytest-$name" -m gpu "$file"
        done
        for file in "${files[@]:first:4}"; do
            finish "$(basename "$file" .py)" "$file" 120
        done
    done
    part "$rates" 60 "${pytest[@]}" --basetemp "$scratch/pytest-rates" -m gpu "$rates"
fi
if wanted sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        # Blocks that torch's allocator keeps would hide what is outside of a tensor; of its own pools CUDA knows which
        # stream may use what.
        beside memcheck 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
            python3 tests/gpu/stress.py --seconds 40
        part "stress, races of streams" 90 env PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync compute-sanitizer \
            --tool memcheck --track-stream-ordered-races all --error-exitcode 9 \
            python3 tests/gpu/stress.py --seconds 40 --wait-on-device
        finish memcheck "stress, accesses out of place" 30
    else
        printf '\nno compute-sanitizer here: the stress test runs without it\n'
        part "stress of the streams" 90 python3 tests/gpu/stress.py --seconds 50
    fi
fi
wanted io && finish io "I/O engine, swap space" 60
# A peer that does not compile is missing, which is no failure of ours.
[ -z "$peer" ] || { finish deepspeed "DeepSpeed's CPUAdam compiles" 100 peer && peer=built; }
# Parts of a benchmark lie beside it. Its status 1 says that a goal was missed, which its table shows, or that it broke.
bench() { env -u PYTHONSAFEPATH python3 "$repository/bench/$1" "${@:2}"; }
export -f bench
export repository
wanted copies && part "copy rates" 40 bash -c 'bench gpu_copy.py'
if wanted step; then
    # It ends by itself before it is ended: its report comes last. The model that does not fit is one for a card of 16
    # GiB, since to fill host memory with a larger one takes minutes.
    limit=$(left 240)
    more=(--seconds $((limit - 25)) --turn 1 --parameters 6e8 --limit 16GiB --resized)
    [ -z "$report" ] || more+=(--markdown "$report-step.md" --json "$report-step.json")
    [ "$peer" = built ] || more+=(--no-peers)
    [ "$limit" -gt 60 ] || limit=0 # less shows nothing
    part "training step" "$limit" bash -c 'bench bench_gpu_step.py "$@"' _ "$scratch" "${more[@]}"
fi
if wanted disk; then
    if command -v fio >/dev/null; then
        # Quick readings prove nothing of a goal.
        part "I/O rates" 60 bash -c 'bench bench_aio.py --quick "$0" || [ $? -eq 1 ]' "$scratch"
    else
        printf '\nno fio here: I/O rates are left out\n'
    fi
fi

echo
printf '%s\n' "${parts[@]}"
exit $failed
