"""The rates of the device that computes, by torch: ``tiering.planning.measure`` has the others, without torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiering import logs
from tiering.placement.plan import Budgets, Tier, Workload
from tiering.planning import conditions
from tiering.planning.measure import SECONDS, Leg, Measurement, Tell, of_cpu, quietly, repeated
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import SavedRates
from tiering.planning.update_share import best_share
from tiering.storage.arena import Arena
from zero3.device.tiers import as_tensor, register_with_cuda, unregister_with_cuda
from zero3.params.precision import COMPUTE_DTYPES
from zero3.ranks.collectives import Collectives

log = logging.getLogger(__name__)

HEAD_WIDTH = 64
WEIGHTS_BYTES = 192 << 20  # of blocks that take turns: more than a cache holds
MOST_BLOCKS = 24  # narrow ones are in a cache when they are trained, too
LINK_BYTES = 256 << 20
SCRATCH = 64 << 20  # bytes that are copied in the device's memory
QUEUED = 10  # calls at a time
# The device is measured with no more: matrices are large then, and it is short.
MOST_TOKENS = {"cpu": 512, "cuda": 4096}


def of_this_machine(
    *, on_gpu: bool, compute_dtype: str, tokens: int, seconds: float | None = None
) -> Measurement | None:
    """Of its GPU, or of its CPU as the device; None if there is no GPU. ``compute_dtype``: bf16, fp16 or fp32."""
    if on_gpu and (not torch.cuda.is_available() or os.environ.get("TIERING_DEVICE") == "cpu"):
        return None
    return of_device(
        torch.device("cuda" if on_gpu else "cpu"),
        COMPUTE_DTYPES[compute_dtype],
        tokens=tokens,
        seconds=seconds,
    )


def saved_rates(load: Workload, device: torch.device, *, local_ranks: int) -> Rates:
    """What ``tiering plan --measure`` has found of this GPU's link and of the CPUs of this node for ``load``.

    Each of its ``local_ranks`` has a part of the CPUs, as was not so when they were measured.
    """
    saved = SavedRates.of_user()
    cpu = of_cpu(
        state_format=load.state_format, state_tensors=load.state_tensors, grad_itemsize=load.grad_itemsize
    )
    part = {"cpus", "threads"} if local_ranks > 1 else set()
    link = of_device(device, torch.float32, tokens=1)
    found = (
        saved.find_like(cpu, but_for=part),
        saved.find_like(link, but_for={"dtype", "tokens"} | (part - {"threads"})),
    )
    rates = Rates()
    for record in found:
        rates = rates.updated(record.rates) if record is not None else rates
    return rates


def saved_link_rate(load: Workload, device: torch.device, *, local_ranks: int) -> int | None:
    """Bytes per second each way over the link of a GPU, if ``tiering plan --measure`` has measured it."""
    if device.type != "cuda":
        return None
    rate = saved_rates(load, device, local_ranks=local_ranks).device_link
    return None if rate is None else round(rate)


def settle_update_share(
    load: Workload,
    budgets: Budgets,
    device: torch.device,
    *,
    local_ranks: int,
    collectives: Collectives | None,
) -> Workload:
    """``load`` with the share of updates on the GPU that is fastest on the slowest rank; none where nobody measured."""
    share = best_share(load, budgets, saved_rates(load, device, local_ranks=local_ranks).of_rank(local_ranks))
    if collectives is not None:
        row = torch.tensor([share], dtype=torch.float64, device="cpu")
        share = float(collectives.table(row, "compare rates").min())
    if not share and Tier.HOST in load.optimizer_tiers:
        log.log(
            logs.once(logging.INFO),
            "the CPU updates what is in host memory; whether a GPU would be faster, tiering plan --measure finds out",
        )
    return replace(load, update_on_device=share)


def of_device(
    device: torch.device, dtype: torch.dtype, *, tokens: int, seconds: float | None = None
) -> Measurement:
    """FLOP/s with micro-batches of ``tokens`` (small ones compute slower), and a GPU's link and memory."""
    tokens = min(tokens, MOST_TOKENS[device.type])
    depends = conditions.machine() | {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        depends["threads"] = torch.get_num_threads()
    else:
        found = torch.cuda.get_device_properties(device)
        depends |= {
            "name": found.name,
            "device_memory": found.total_memory,
            "uuid": str(getattr(found, "uuid", "")),  # two that are alike may have unlike links
            "cuda": torch.version.cuda,
        }

    def run(tell: Tell) -> Rates:
        return measure(
            device, dtype, tokens=tokens, seconds=SECONDS if seconds is None else seconds, tell=tell
        )

    return Measurement("device", depends, run)


def measure(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 1024,
    width: int = 1024,
    seconds: float = SECONDS,
    tell: Tell = quietly,
) -> Rates:
    """FLOP/s of transformer blocks of ``width`` on one sequence of ``tokens``; on a GPU also its link and memory.

    Forward and backward together, as a step has them: 6 operations for each parameter of a matrix and token.
    """
    rates = Rates(flops=_flops(device, dtype, tokens, width, seconds))
    assert rates.flops is not None
    tell(Leg("flops", rates.flops))
    return rates if device.type == "cpu" else rates.updated(_memory_rates(device, seconds / 4, tell))


class Block(nn.Module):
    """The measured model: a transformer block with 12 * width * width elements in its matrices."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, stream: Tensor) -> Tensor:
        """``stream`` and the result: [batch, sequence, width]."""
        qkv = self.qkv(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, width of a head]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.projection(mixed.transpose(1, 2).flatten(2))
        result: Tensor = stream + self.mlp(stream)
        return result


def _flops(device: torch.device, dtype: torch.dtype, tokens: int, width: int, seconds: float) -> float:
    heads = max(1, width // HEAD_WIDTH)
    each = 12 * width * width
    count = min(MOST_BLOCKS, max(2, -(-WEIGHTS_BYTES // (each * dtype.itemsize))))
    with torch.device(device):
        blocks = [Block(width, heads).to(dtype) for _ in range(count)]
        stream = torch.randn(1, tokens, width, dtype=dtype)

    for block in blocks:
        for parameter in block.parameters():  # a gradient is taken as soon as it is there, as the engine does
            parameter.register_post_accumulate_grad_hook(_drop)

    def train() -> None:
        passed = stream
        for block in blocks:
            passed = block(passed)
        passed.sum().backward()

    with torch.enable_grad():
        return 6.0 * each * count * tokens * _per_second(train, device, seconds)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _memory_rates(device: torch.device, seconds: float, tell: Tell) -> Rates:
    """The link each way and both at once, from an arena as the engine has it, and the device's own memory.

    Of the ways alone the planner's link is the slower one.
    """
    arena = Arena.map(2 * LINK_BYTES, "measured link", pin=register_with_cuda)
    try:
        found = _copies(arena, device, seconds, tell)
    finally:
        unregister_with_cuda(arena.address, device)
    return Rates(
        device_link=min(found["to_device"], found["from_device"]),
        device_link_both=found["device_both"],
        device_memory=found["device_memory"],
    )


def _copies(arena: Arena, device: torch.device, seconds: float, tell: Tell) -> dict[str, float]:
    """Bytes per second of each leg."""
    sent, received = (as_tensor(arena.lease(LINK_BYTES, "link")) for _ in range(2))
    arrived, leaving = (torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    source, target = (torch.empty(SCRATCH, dtype=torch.uint8, device=device) for _ in range(2))

    def there() -> None:
        arrived.copy_(sent, non_blocking=True)

    def back() -> None:
        received.copy_(leaving, non_blocking=True)

    def within() -> None:
        target.copy_(source)

    found = {}
    for name, calls, nbytes in (
        ("to_device", [there], LINK_BYTES),
        ("from_device", [back], LINK_BYTES),
        ("device_both", [there, back], 2 * LINK_BYTES),
        ("device_memory", [within], 2 * SCRATCH),  # read and written
    ):
        found[name] = nbytes * _side_by_side(calls, device, seconds)
        tell(Leg(name, found[name]))
    return found


def _side_by_side(calls: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> float:
    """How often all of ``calls`` happen per second on a GPU, each on a stream of its own; by the GPU's clock.

    They are queued ``QUEUED`` at a time, so that Python is not waited for, and once before it counts.
    """
    streams = [torch.cuda.Stream(device) for _ in calls]

    def batch() -> float:
        began = torch.cuda.Event(enable_timing=True)
        began.record(streams[0])
        ends = []
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_event(began)
            with torch.cuda.stream(stream):
                for _ in range(QUEUED):
                    call()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
        for end in ends:
            end.synchronize()
        milliseconds: float = max(began.elapsed_time(end) for end in ends)
        return milliseconds / 1e3

    torch.cuda.synchronize(device)  # the memory was made on another stream
    batch()
    count, took = 0, 0.0
    while not count or took < seconds:
        took += batch()
        count += QUEUED
    return count / took


def _per_second(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Calls per second. On a GPU calls are queued by the ten, and all of them are waited for."""
    if device.type == "cpu":
        return repeated(call, seconds)

    def many() -> None:
        for _ in range(QUEUED):
            call()
        torch.cuda.synchronize(device)

    return QUEUED * repeated(many, seconds)
