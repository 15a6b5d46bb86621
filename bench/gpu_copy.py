"""Copy rates between a GPU and the pinned arena, beside torch's own pinned memory, alternating.

    python bench/gpu_copy.py [--mib 256] [--rounds 9]

Prints the median and the spread of GB/s (10^9) for each direction and kind of host memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tiering.arena import Arena
from zero3.tiers import as_tensor, register_with_cuda


def seconds(copy: Callable[[], object]) -> float:
    """Time of one copy on the device's own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    copy()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of one copy")
    parser.add_argument("--rounds", type=int, default=9, help="measured copies of each kind")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_copy: torch finds no CUDA device", file=sys.stderr)
        return 2
    nbytes = options.mib << 20
    arena = Arena.map(nbytes, "host", pin=register_with_cuda)
    host: dict[str, Tensor] = {
        "arena": as_tensor(arena.lease(nbytes, "bench")),
        "torch pinned": torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        "pageable": torch.empty(nbytes, dtype=torch.uint8),
    }
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.mib} MiB per copy")
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.rounds + 2):
        for kind, memory in host.items():
            pairs = {"to device": (device, memory), "to host": (memory, device)}
            for direction, (target, source) in pairs.items():
                took = seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True))
                if turn >= 2:
                    rates.setdefault((direction, kind), []).append(nbytes / took / 1e9)
    for (direction, kind), found in rates.items():
        print(
            f"{direction:10} {kind:13} {statistics.median(found):6.2f} GB/s"
            f"  ({min(found):.2f} to {max(found):.2f}, {len(found)} copies)"
        )
    torch.cuda.cudart().cudaHostUnregister(arena.address)
    return 0


if __name__ == "__main__":
    sys.exit(main())
