"""A small model with everything that makes placement hard, and one way to train it anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tests.zero3.plain import starved_soon
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.telemetry import Snapshot
from zero3.device import nan_memory, tiers
from zero3.engine.engine import Engine

VOCABULARY = 600
SEQUENCE = 16
NVME_STATE = {"offload_param": "nvme", "offload_optimizer": "nvme"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(stream))))
        return stream + hidden


class SmallModel(nn.Module):
    """Tied embedding and head (a large group with two entries), blocks, a root group, small persistent parameters."""

    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.position(torch.arange(SEQUENCE))
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Trained:
    """What a run left behind."""

    losses: list[float]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    norms: list[float]
    snapshot: Snapshot
    engine: Engine = field(repr=False)


def batches(count: int, seed: int = 7) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def config(
    nvme: Path | list[Path] | dict[str, Path | list[Path]],
    *,
    precision: str = "bf16",
    accumulation: int = 2,
    offload_param: str = "none",
    offload_optimizer: str = "none",
    threshold: int = 100,
    sub_group_size: int = 10**9,
    prefetch: int = 10**6,
    clip: float = 1.0,
    rule: str | None = "AdamW",
    optimizer: dict[str, Any] | None = None,
    ratio: float | None = None,
    stage: int = 3,
    fp16: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **tiers: Any,
) -> dict[str, Any]:
    """A configuration as a user writes it; keyword arguments left over go to the ``tiering`` block.

    ``nvme`` is a directory, a list of them, or either for each of "param" and "optimizer". ``rule`` None leaves the
    optimizer's section out. ``zero`` are further keys of "zero_optimization".
    """

    def section(kind: str, device: str) -> dict[str, Any]:
        where = nvme[kind] if isinstance(nvme, dict) else nvme
        directories = [str(path) for path in where] if isinstance(where, list) else str(where)
        return {"device": device} | ({"nvme_path": directories} if device == "nvme" else {})

    usual = {"lr": 1e-3, "weight_decay": 0.1} if rule == "AdamW" else {}
    named = {"optimizer": {"type": rule, "params": usual | (optimizer or {})}} if rule else {}
    share = {} if ratio is None else {"ratio": ratio}
    return named | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"} | (fp16 or {}),
        "zero_optimization": {
            "stage": stage,
            "offload_param": section("param", offload_param),
            "offload_optimizer": section("optimizer", offload_optimizer) | share,
            "sub_group_size": sub_group_size,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_param_persistence_threshold": threshold,
        }
        | (zero or {}),
        "tiering": {"device_budget": "16MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}}
        | tiers,
    }


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    # Its 2 MiB are more than these models take: a quarter of an engine's start, and mapped once where models map many.
    monkeypatch.setattr(nan_memory, "BLOCK", 16 << 10)
    # Tests that ask for no warning train in bf16 on any CPU.
    monkeypatch.setattr("zero3.initialize.warn_if_slow", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for models as small as these, threads only wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def start(nvme: Path) -> Iterator[Callable[..., Engine]]:
    """``start(model=None, **config)`` makes an engine; it is closed after the test.

    ``client`` is what ``initialize`` takes as optimizer.
    """
    engines: list[Engine] = []

    def make(
        model: nn.Module | None = None,
        *,
        model_parameters: Any = None,
        paths: Any = None,
        client: Any = None,
        weights: Path | None = None,
        strict: bool = True,
        **options: Any,
    ) -> Engine:
        if model is None:
            torch.manual_seed(3)
            model = SmallModel()
        settings = config(paths or nvme, **options)
        arguments = {"model_parameters": model_parameters} | (
            {"optimizer": client} if client is not None else {}
        )
        arguments |= {"weights": weights, "strict": strict} if weights is not None else {}
        engine = tiering.initialize(model=model, config=settings, **arguments).engine
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def starve_soon() -> Iterator[None]:
    """A lease that nobody gives back shows as an ArenaError, not as a test that hangs."""
    with starved_soon():
        yield


@pytest.fixture
def plan_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``plan_fault(fault)`` is what every I/O context made from here on meets; nothing without a fault."""

    def plan(*faults: Fault) -> None:
        monkeypatch.setattr(tiers, "AioContext", partial(AioContext, fault=FaultPlan(faults)))

    return plan


@pytest.fixture
def train(start: Callable[..., Engine]) -> Callable[..., Trained]:
    """``train(steps=4, model=None, **config)`` trains to the end and returns what is left."""

    def run(steps: int = 4, model: nn.Module | None = None, **options: Any) -> Trained:
        engine = start(model, **options)
        losses, norms = [], []
        for tokens, targets in batches(steps * engine.settings.gradient_accumulation_steps):
            loss = engine(tokens, targets)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights, masters = copy.deepcopy(engine.state_dict()), engine.master_state_dict()
        snapshot = engine.snapshot()
        engine.close()
        return Trained(losses, weights, masters, norms, snapshot, engine)

    return run


def same_bits(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names whose bytes differ, or that only one side has."""
    names = set(first) ^ set(other)
    return sorted(
        names
        | {name for name in set(first) & set(other) if not _bytes(first[name]).equal(_bytes(other[name]))}
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def differing() -> Callable[[dict[str, Tensor], dict[str, Tensor]], list[str]]:
    return same_bits


@pytest.fixture
def small_model() -> type[SmallModel]:
    return SmallModel


@pytest.fixture
def micro_batches() -> Callable[..., Iterator[tuple[Tensor, Tensor]]]:
    return batches


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher; a process group that the test makes is gone afterwards, and so are variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # which remembers what it was
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
