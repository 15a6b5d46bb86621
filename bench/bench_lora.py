"""Products with a quantised base, beside bitsandbytes and torch, alternating in one process.

    python bench/bench_lora.py [--size 4096] [--inputs 1 4 16 128] [--rounds 9] [--threads 2] [--dtype bfloat16]

Each side multiplies the same inputs with one weight of size x size. **nf4**, **int8** and **fp8** are ours; **dense**
is torch's product with the weight in the dtype of the inputs. **bitsandbytes** is its Linear4bit (nf4, double
quantisation), if the package is installed; otherwise the report says so. Every side runs once per round, in an order
that rotates. Before each, everyone sleeps 20 ms: idle OpenMP threads spin for a while. Times are medians, with the
fastest and the slowest.

**One row** also has rates of encoded bytes: of a weight that is larger than the caches, and of the same loop over a
weight that fits the second-level caches, beside the **roof**, torch's sum over 256 MiB. Their share is of the lower of
the two. Speeds of shared machines swing within minutes; only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from optim_cpu import kernels
from optim_cpu.formats import QUANTIZED, quantized
from optim_cpu.quantization import Weight

Sides = dict[str, Callable[[], object]]

L2_BYTES = 400 << 10  # of a thread's second-level cache: inputs and outputs need room too


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    time.sleep(0.02)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def measure(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each side in each round."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        sides[name]()
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(timed(sides[name]))
    return times


def encoded(name: str, rows: int, columns: int) -> Weight:
    form = quantized(name)
    return Weight(form, *form.encode(torch.randn(rows, columns) * 0.02))


def bitsandbytes_layer(weight: torch.Tensor) -> Callable[[torch.Tensor], object] | None:
    """Linear4bit of bitsandbytes over ``weight``, (outputs, inputs); None if the package is not installed."""
    try:
        import bitsandbytes as bnb
    except ImportError:
        return None
    outputs, inputs = weight.shape
    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    layer = layer.to("cpu").eval()
    return lambda x: layer(x)


@torch.no_grad()
def products(options: argparse.Namespace) -> None:
    dtype = getattr(torch, options.dtype)
    dense = (torch.randn(options.size, options.size) * 0.02).to(dtype)
    weights = {name: encoded(name, options.size, options.size) for name in QUANTIZED}
    layer = bitsandbytes_layer(dense.clone())
    if layer is None:
        print("bitsandbytes is not installed: it is not compared")
    for inputs in options.inputs:
        x = torch.randn(inputs, options.size).to(dtype)
        sides: Sides = {
            name: lambda weight=weight, x=x: weight.product(x) for name, weight in weights.items()
        }
        sides["dense"] = lambda x=x: x @ dense.t()
        if layer is not None:
            sides["bitsandbytes"] = lambda x=x: layer(x)
        for name, ms in measure(sides, options.rounds).items():
            spread = f"{min(ms):.2f} to {max(ms):.2f}"
            print(f"{inputs:5} rows  {name:13} {statistics.median(ms):8.2f} ms ({spread})")


def one_row(options: argparse.Namespace) -> None:
    large = torch.zeros(32 << 20, dtype=torch.int64)
    large.fill_(1)
    x, y = torch.randn(1, options.size), {}
    for name in QUANTIZED:
        nbytes = quantized(name).bytes_per_element * options.size
        sides: Sides = {"roof": lambda: large.sum()}
        rows = {"memory": 4 * options.size, "cache": max(int(options.threads * L2_BYTES / nbytes), 1)}
        for place, count in rows.items():
            y[place] = encoded(name, count, options.size)
            sides[place] = lambda weight=y[place]: weight.product(x)
        ms = {place: statistics.median(times) for place, times in measure(sides, options.rounds).items()}
        rates = {place: count * nbytes / ms[place] / 1e6 for place, count in rows.items()}
        roof = large.nbytes / ms["roof"] / 1e6
        share = rates["memory"] / min(roof, rates["cache"])
        print(
            f"one row  {name:5} {rates['memory']:6.1f} GB/s from memory, {rates['cache']:6.1f} from the cache, roof"
            f" {roof:.1f}: {share:.2f} of the lower"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="inputs and outputs of the layer")
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=kernels.thread_count())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels.set_thread_count(options.threads)
    print(
        f"torch {torch.__version__}, {kernels.instruction_set()}, {options.threads} threads, {options.dtype}"
    )
    products(options)
    one_row(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
