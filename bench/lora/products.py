"""Products with a quantised base, beside bitsandbytes and torch, alternating in one process.

Each side multiplies the same inputs with one weight. **nf4**, **int8** and **fp8** are ours; **dense** is torch's
product with the weight in the dtype of the inputs. **bitsandbytes** is its Linear4bit (nf4, double quantisation) as it
trains: it decodes the weight, and torch multiplies. **bitsandbytes, inference** is the same layer in evaluation, which
has a kernel of its own on CPUs with AVX512-BF16, over a second copy of the weight. Backward is the product of a
gradient with the weight, which is the gradient of the inputs. On every side it follows forward at once, and its time
counts alone. Every side runs once per round, in an order that rotates. Before each, everyone sleeps 20 ms: idle OpenMP
threads spin for a while.

**One row** has rates of encoded bytes: of a weight that is larger than the caches, and of the same loop over a weight
that fits the second-level caches, beside the **roof**, torch's sum over 256 MiB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from frame.report import Report, Table, Verdict, middle

from optim_cpu.formats import QUANTIZED, quantized
from optim_cpu.quantization import Weight

Sides = dict[str, Callable[[], object]]

TRAINED, INFERENCE, DENSE = "bitsandbytes", "bitsandbytes, inference", "dense"
L2_BYTES = 400 << 10  # of a thread's second-level cache: inputs and outputs need room too
MEMORY_BYTES = 96 << 20  # three times a large last-level cache
LEAST_SHARE = 0.8
PAUSE = 0.02
REPEATS = 20


def measure(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each side in each round; a side may return the seconds that count."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        sides[name]()
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            time.sleep(PAUSE)
            began = time.perf_counter()
            counted = sides[name]()
            seconds = counted if isinstance(counted, float) else time.perf_counter() - began
            times[name].append(seconds * 1e3)
    return times


def encoded(name: str, values: torch.Tensor) -> Weight:
    form = quantized(name)
    return Weight(form, *form.encode(values))


def bitsandbytes_layer(weight: torch.Tensor, *, trains: bool) -> Any:
    """Linear4bit of bitsandbytes over ``weight``, (outputs, inputs); None if the package is not installed."""
    try:
        import bitsandbytes as bnb
    except ImportError:
        return None
    outputs, inputs = weight.shape
    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    return layer.to("cpu").train(trains)


def products(
    report: Report, shape: tuple[int, int], inputs: list[int], dtype: torch.dtype, rounds: int
) -> None:
    """A table of times by rows of inputs, and the goals beside bitsandbytes."""
    outputs, columns = shape
    dense = (torch.randn(outputs, columns) * 0.02).to(dtype)
    weights = {name: encoded(name, dense) for name in QUANTIZED}
    trained, inference = (bitsandbytes_layer(dense, trains=trains) for trains in (True, False))
    if trained is None and "bitsandbytes: it is not installed" not in report.skipped:
        report.skipped.append("bitsandbytes: it is not installed")
    name = f"{str(dtype).removeprefix('torch.')}, {outputs} x {columns}"
    names = [*QUANTIZED, DENSE, *([TRAINED, INFERENCE] if trained is not None else [])]
    table = Table(f"products, ms, {name}", ("rows", *names))
    back = Table(f"gradients of inputs, ms, {name}", ("rows", *(each for each in names if each != INFERENCE)))
    for rows in inputs:
        x, grad = torch.randn(rows, columns).to(dtype), torch.randn(rows, outputs).to(dtype)
        forward = _forward(weights, dense, trained, inference, x)
        backward = _backward(weights, dense, trained, x, grad)
        times, back_times = measure(forward, rounds), measure(backward, rounds)
        table.rows.append((str(rows), *(middle(times[each], ".2f") for each in table.columns[1:])))
        back.rows.append((str(rows), *(middle(back_times[each], ".2f") for each in back.columns[1:])))
        if trained is not None:
            for peer, measured in ((TRAINED, times), (INFERENCE, times), (TRAINED, back_times)):
                of = "backward" if measured is back_times else "forward"
                report.verdicts.append(_as_fast(f"{name}, {rows} rows, {of}: nf4 / {peer}", measured, peer))
    report.tables += [table, back]


def _forward(
    weights: Mapping[str, Weight], dense: torch.Tensor, trained: Any, inference: Any, x: torch.Tensor
) -> Sides:
    sides: Sides = {name: lambda weight=weight: weight.product(x) for name, weight in weights.items()}
    sides[DENSE] = lambda: x @ dense.t()
    if trained is not None:
        sides[TRAINED] = lambda: trained(x)
        sides[INFERENCE] = lambda: _without_gradients(inference, x)
    return sides


def _backward(
    weights: Mapping[str, Weight], dense: torch.Tensor, trained: Any, x: torch.Tensor, grad: torch.Tensor
) -> Sides:
    sides: Sides = {
        name: lambda weight=weight: _seconds_of_backward(
            lambda: weight.product(x), lambda: weight.transposed_product(grad)
        )
        for name, weight in weights.items()
    }
    sides[DENSE] = lambda: _seconds_of_backward(lambda: x @ dense.t(), lambda: grad @ dense)
    if trained is not None:
        sides[TRAINED] = lambda: _backward_alone(trained, x, grad)
    return sides


def _seconds_of_backward(forward: Callable[[], object], backward: Callable[[], object]) -> float:
    """The seconds of backward, after a forward that is not counted."""
    forward()
    began = time.perf_counter()
    backward()
    return time.perf_counter() - began


def _without_gradients(layer: Any, x: torch.Tensor) -> object:
    with torch.no_grad():
        return layer(x)


def _backward_alone(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
    """The same by autograd."""
    source = x.detach().requires_grad_()
    output = layer(source)
    began = time.perf_counter()
    torch.autograd.grad(output, source, grad)
    return time.perf_counter() - began


def _as_fast(what: str, times: Mapping[str, list[float]], peer: str) -> Verdict:
    ratio = statistics.median(times["nf4"]) / statistics.median(times[peer])
    return Verdict(what, f"{ratio:.2f}", "at most 1", ratio <= 1)


def _each(run: Callable[[], object]) -> float:
    """The seconds of one of several runs in a row: the first one wakes threads, and fills the cache."""
    run()
    began = time.perf_counter()
    for _ in range(REPEATS):
        run()
    return (time.perf_counter() - began) / REPEATS


def one_row(report: Report, columns: int, dtype: str, threads: int, rounds: int) -> None:
    """The rate of one row of inputs in ``dtype`` beside the memory's and the cache's."""
    large = torch.zeros(32 << 20, dtype=torch.int64)
    large.fill_(1)
    x = torch.randn(1, columns).to(getattr(torch, dtype))
    table = Table(
        f"one row in {dtype}, GB/s of encoded bytes", ("format", "from memory", "from the cache", "roof")
    )
    for name in QUANTIZED:
        nbytes = quantized(name).bytes_per_element * columns
        rows = {"memory": MEMORY_BYTES // int(nbytes), "cache": max(int(threads * L2_BYTES / nbytes), 1)}
        weights = {place: encoded(name, torch.randn(count, columns) * 0.02) for place, count in rows.items()}
        sides: Sides = {
            "roof": large.sum,
            "memory": lambda weight=weights["memory"]: _each(lambda: weight.product(x)),
            "cache": lambda weight=weights["cache"]: _each(lambda: weight.product(x)),
        }
        ms = {place: statistics.median(times) for place, times in measure(sides, rounds).items()}
        rates = {place: count * nbytes / ms[place] / 1e6 for place, count in rows.items()}
        roof = large.nbytes / ms["roof"] / 1e6
        share = rates["memory"] / min(roof, rates["cache"])
        table.rows.append((name, f"{rates['memory']:.1f}", f"{rates['cache']:.1f}", f"{roof:.1f}"))
        goal = f"at least {LEAST_SHARE}"
        report.verdicts.append(
            Verdict(
                f"one row in {dtype}, {name}: memory / min(roof, cache)",
                f"{share:.2f}",
                goal,
                share >= LEAST_SHARE,
            )
        )
    report.tables.append(table)
