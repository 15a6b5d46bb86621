"""CPU AdamW beside torch's fused AdamW, alternating in one run over the same memory.

    python bench/bench_adam.py [--numel 128000000] [--rounds 9] [--threads N] [--isa avx2]

Rows, each timed once per round, in turn:

    torch step           28 B per parameter   torch.optim.AdamW(fused=True), fp32 gradient
    ours fp32            28                   fp32 gradient, no copy-out
    torch step + copy    34                   torch step, then the bf16 copy-out that mixed precision needs
    ours bf16            28                   bf16 gradient in, bf16 parameter out, one pass
    torch whole job      40                   what ours does: bf16 gradient cast to fp32, step, copy-out
    roof                  8                   an in-place read and write of fp32: what this memory does now

Speeds of shared machines swing within minutes; only the ratios of one run mean anything. GB/s is 10^9 bytes
per second over the bytes above. Memory: 20 B per parameter, 2.6 GB by default.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from optim_cpu import kernels
from optim_cpu.adam import step_adamw

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def make_rows(numel: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Row name -> (bytes per parameter, what to time). All rows step the same tensors."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    theirs = torch.optim.AdamW([parameter], fused=True, **HYPER)
    theirs.step()  # creates the moments
    master, grad = parameter.detach(), parameter.grad
    state = theirs.state[parameter]
    moments = state["exp_avg"], state["exp_avg_sq"]
    half_grad, half_out = grad.bfloat16(), torch.empty(numel, dtype=torch.bfloat16)

    def torch_step_copy() -> None:
        theirs.step()
        half_out.copy_(master)

    def torch_whole() -> None:
        grad.copy_(half_grad)
        torch_step_copy()

    return {
        "torch step": (28, theirs.step),
        "ours fp32": (28, lambda: step_adamw(master, *moments, grad, step=5, **HYPER)),
        "torch step + copy": (34, torch_step_copy),
        "ours bf16": (28, lambda: step_adamw(master, *moments, half_grad, out=half_out, step=5, **HYPER)),
        "torch whole job": (40, torch_whole),
        "roof": (8, lambda: grad.mul_(1.0)),
    }


def measure(rows: dict[str, tuple[int, Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round; a first, untimed round touches all memory and starts all threads."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round_number in range(rounds + 1):
        for name, (_, run) in rows.items():
            start = time.perf_counter()
            run()
            if round_number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def report(
    numel: int, rows: dict[str, tuple[int, Callable[[], object]]], times: dict[str, list[float]]
) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'':18s} {'B/param':>7s} {'median ms':>10s} {'min-max':>13s} {'GB/s':>6s} {'of roof':>8s}")
    roof = 8 * numel / medians["roof"]
    for name, (size, _) in rows.items():
        rate = size * numel / medians[name]
        spread = f"{min(times[name]):.0f}-{max(times[name]):.0f}"
        print(
            f"{name:18s} {size:7d} {medians[name]:10.1f} {spread:>13s} {rate / 1e6:6.1f} {rate / roof:8.2f}"
        )
    for ours, peer in (
        ("ours fp32", "torch step"),
        ("ours bf16", "torch step"),
        ("ours bf16", "torch step + copy"),
        ("ours bf16", "torch whole job"),
    ):
        ratios = sorted(b / a for a, b in zip(times[ours], times[peer], strict=True))
        middle = statistics.median(ratios)
        print(f"{ours} against {peer}: {middle:.2f}x  ({ratios[0]:.2f}-{ratios[-1]:.2f} by round)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--numel", type=int, default=128_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=kernels.thread_count())
    parser.add_argument(
        "--isa", default=kernels.instruction_set(), choices=kernels.available_instruction_sets()
    )
    arguments = parser.parse_args()
    kernels.set_instruction_set(arguments.isa)
    kernels.set_thread_count(arguments.threads)
    torch.set_num_threads(arguments.threads)
    print(
        f"{arguments.numel / 1e6:.0f} M parameters, {arguments.rounds} rounds, {arguments.threads} threads, "
        f"{arguments.isa}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{cpu_model()}, {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}"
    )
    rows = make_rows(arguments.numel)
    report(arguments.numel, rows, measure(rows, arguments.rounds))


if __name__ == "__main__":
    main()
