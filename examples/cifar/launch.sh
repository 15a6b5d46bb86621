#!/bin/bash
# One rank for each GPU of this machine; RANKS and what train.py takes are the caller's:
#     RANKS=2 bash examples/cifar/launch.sh --steps 100
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
exec torchrun --standalone --nproc-per-node="${RANKS:-gpu}" "$here/train.py" \
    --deepspeed --deepspeed_config "$here/ds_config.json" "$@"
