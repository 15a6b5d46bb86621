"""Resident memory and step time of a GPT whose state is on NVMe, against its plan and against everything in memory.

    python bench/bench_memory.py DIR [--width 768] [--layers 14] [--accumulation 1] [--host 256MiB] [--device 128MiB]

Each side runs in a process of its own; peaks count from before the model is built and are net of interpreter and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from frame.process import resident

STEPS = 8  # the first is left out


def train(options: argparse.Namespace) -> dict[str, float]:
    import torch

    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    baseline = resident("VmRSS")

    import tiering
    from tiering.demo.model import GPT
    from tiering.placement.workload import Tier

    swap = {"device": "nvme", "nvme_path": options.dir} if options.side == "nvme" else {"device": "none"}
    budgets = {"host_budget": options.host, "device_budget": options.device, "cache_in_host": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": swap, "offload_optimizer": swap},
        "tiering": {"telemetry": {"enabled": False}} | (budgets if options.side == "nvme" else {}),
    }
    torch.manual_seed(0)
    with tiering.zero.Init(config=config):
        model = GPT(width=options.width, layers=options.layers, heads=options.width // 64, sequence=32)
    with tiering.initialize(model=model, config=config).engine as engine:
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            for _ in range(options.accumulation):
                tokens = torch.randint(256, (1, 33))
                engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
                engine.step()
            times.append(time.perf_counter() - began)
        plan = engine.plan
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "planned": plan.total(Tier.DEVICE) + plan.total(Tier.HOST),
            "state": plan.state_bytes(),
            "peak": resident("VmHWM") - baseline,
            "step": statistics.median(times[1:]),
            "fastest": min(times[1:]),
            "slowest": max(times[1:]),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", help="directory on the disk to swap to")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--host", default="256MiB")
    parser.add_argument("--device", default="128MiB")
    parser.add_argument("--side", choices=["nvme", "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(train(options)))
        return 0
    for side in ("nvme", "memory"):
        run = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--side", side], check=True, stdout=subprocess.PIPE
        )
        result = json.loads(run.stdout)
        print(
            f"{side:7} {result['parameters'] / 1e6:.1f} M parameters, state {result['state'] / 2**20:.0f} MiB:"
            f" planned {result['planned'] / 2**20:.0f} MiB, peak RSS net {result['peak'] / 2**20:.0f} MiB,"
            f" step {result['step']:.3f} s ({result['fastest']:.3f} to {result['slowest']:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
