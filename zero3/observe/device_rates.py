"""Measures the rates of the compute device with torch; ``tiering.planning.measure`` measures the others without it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiering import _logs
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier, Workload
from tiering.planning import conditions
from tiering.planning.measure import SECONDS, Leg, Measurement, Tell, of_cpu, quietly, repeated
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import SavedRates
from tiering.planning.update_share import best_share
from tiering.storage.arena import Arena
from zero3.device.pinning import register_with_cuda, unregister_with_cuda
from zero3.device.storages import as_tensor
from zero3.params.precision import COMPUTE_DTYPES
from zero3.ranks.collectives import Collectives

log = logging.getLogger(__name__)

HEAD_WIDTH = 64
# Bytes of the weights of all measured blocks: more than a cache holds.
WEIGHTS_BYTES = 192 << 20
# A limit for narrow blocks, which are in a cache during training, too.
MAX_BLOCKS = 24
LINK_BYTES = 256 << 20
# Bytes that are copied within the device's memory.
SCRATCH = 64 << 20
# Calls that are queued on a GPU at a time.
QUEUED = 10
# A limit on the tokens of a measurement: matrices of this size are large, and the measurement stays short.
MAX_TOKENS = {"cpu": 512, "cuda": 4096}
# About the longest pass on a CPU, which has fewer tokens and blocks for this: without instructions for bf16, a CPU may
# compute a hundred times slower.
CPU_SECONDS = 4.0
MIN_TOKENS = 32


def of_this_machine(
    *, on_gpu: bool, compute_dtype: str, tokens: int, seconds: float | None = None
) -> Measurement | None:
    """The measurement of the GPU, or of the CPU as the device; None if there is no GPU.

    ``compute_dtype`` is bf16, fp16 or fp32.
    """
    if on_gpu and (not torch.cuda.is_available() or os.environ.get("TIERING_DEVICE") == "cpu"):
        return None
    return of_device(
        torch.device("cuda" if on_gpu else "cpu"),
        COMPUTE_DTYPES[compute_dtype],
        tokens=tokens,
        seconds=seconds,
    )


def saved_rates(load: Workload, device: torch.device, *, local_ranks: int) -> Rates:
    """The saved rates of this GPU's link and this node's CPUs for ``load``, measured by ``tiering plan --measure``.

    With several ``local_ranks`` each has a part of the CPUs, but the measurement had all of them: the numbers of CPUs
    and threads need not match then.
    """
    saved = SavedRates.of_user()
    cpu = of_cpu(
        state_format=load.state_format, state_tensors=load.state_tensors, grad_itemsize=load.grad_itemsize
    )
    part = {"cpus", "threads"} if local_ranks > 1 else set()
    link = of_device(device, torch.float32, tokens=1)
    records = (
        saved.find_like(cpu, but_for=part),
        saved.find_like(link, but_for={"dtype", "tokens"} | (part - {"threads"})),
    )
    rates = Rates()
    for record in records:
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
    """``load`` with the device fraction that is fastest on the slowest rank; 0 if no rates were measured."""
    share = best_share(load, budgets, saved_rates(load, device, local_ranks=local_ranks).of_rank(local_ranks))
    if collectives is not None:
        row = torch.tensor([share], dtype=torch.float64, device="cpu")
        share = float(collectives.run_tables.table(row, "compare rates").min())
    if not share and Tier.HOST in load.optimizer_tiers:
        log.log(
            _logs.once(logging.INFO),
            "the CPU updates parameters in host memory; run tiering plan --measure to find out if the GPU is faster",
        )
    return replace(load, update_on_device=share)


def of_device(
    device: torch.device, dtype: torch.dtype, *, tokens: int, seconds: float | None = None
) -> Measurement:
    """The measurement of FLOP/s with micro-batches of ``tokens``, and of a GPU's link and memory.

    Small micro-batches compute slower.
    """
    tokens = min(tokens, MAX_TOKENS[device.type])
    depends = conditions.machine() | {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        depends["threads"] = torch.get_num_threads()
    else:
        properties = torch.cuda.get_device_properties(device)
        depends |= {
            "name": properties.name,
            "device_memory": properties.total_memory,
            # Two GPUs of the same model may have different links.
            "uuid": str(getattr(properties, "uuid", "")),
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
    count = min(MAX_BLOCKS, max(2, -(-WEIGHTS_BYTES // (each * dtype.itemsize))))
    with torch.device(device):
        blocks = [Block(width, heads).to(dtype) for _ in range(count)]
        stream = torch.randn(1, tokens, width, dtype=dtype)

    for block in blocks:
        for parameter in block.parameters():
            # The gradient is dropped as soon as it exists, because the engine takes it then.
            parameter.register_post_accumulate_grad_hook(_drop)

    def train(tokens: int, count: int) -> None:
        output = stream[:, :tokens]
        for block in blocks[:count]:
            output = block(output)
        output.sum().backward()

    with torch.enable_grad():
        if device.type == "cpu" and tokens > MIN_TOKENS:
            # Tokens times blocks.
            affordable = CPU_SECONDS * MIN_TOKENS * repeated(partial(train, MIN_TOKENS, 1), 0.0)
            tokens = min(tokens, max(MIN_TOKENS, int(affordable / count)))
            count = min(count, max(1, int(affordable / tokens)))
        return 6.0 * each * count * tokens * _per_second(partial(train, tokens, count), device, seconds)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _memory_rates(device: torch.device, seconds: float, tell: Tell) -> Rates:
    """Rates of the link in each direction and in both at once, with a pinned arena, and of the device's own memory.

    The planner uses the slower of the two directions.
    """
    arena = Arena.map(2 * LINK_BYTES, "measured link", pin=register_with_cuda)
    try:
        rates = _copies(arena, device, seconds, tell)
    finally:
        unregister_with_cuda(arena.address, device)
    return Rates(
        device_link=min(rates["to_device"], rates["from_device"]),
        device_link_both=rates["device_both"],
        device_memory=rates["device_memory"],
    )


def _copies(arena: Arena, device: torch.device, seconds: float, tell: Tell) -> dict[str, float]:
    """Bytes per second of each kind of copy."""
    host_source, host_target = (as_tensor(arena.lease(LINK_BYTES, "link")) for _ in range(2))
    device_target, device_source = (
        torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
    )
    source, target = (torch.empty(SCRATCH, dtype=torch.uint8, device=device) for _ in range(2))

    def to_device() -> None:
        device_target.copy_(host_source, non_blocking=True)

    def to_host() -> None:
        host_target.copy_(device_source, non_blocking=True)

    def within_device() -> None:
        target.copy_(source)

    rates = {}
    for name, calls, nbytes in (
        ("to_device", [to_device], LINK_BYTES),
        ("from_device", [to_host], LINK_BYTES),
        ("device_both", [to_device, to_host], 2 * LINK_BYTES),
        # Bytes are read and written.
        ("device_memory", [within_device], 2 * SCRATCH),
    ):
        rates[name] = nbytes * _calls_per_second_on_streams(calls, device, seconds)
        tell(Leg(name, rates[name]))
    return rates


def _calls_per_second_on_streams(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> float:
    """How often all of ``calls`` run per second on a GPU, each on a stream of its own, by the GPU's clock.

    They are queued ``QUEUED`` at a time, so that Python does not limit the rate. One batch runs first as a warm-up.
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

    # The memory was allocated on another stream.
    torch.cuda.synchronize(device)
    batch()
    count, took = 0, 0.0
    while not count or took < seconds:
        took += batch()
        count += QUEUED
    return count / took


def _per_second(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Calls per second. On a GPU ``QUEUED`` calls are queued at a time, and then waited for."""
    if device.type == "cpu":
        return repeated(call, seconds)

    def many() -> None:
        for _ in range(QUEUED):
            call()
        torch.cuda.synchronize(device)

    return QUEUED * repeated(many, seconds)
