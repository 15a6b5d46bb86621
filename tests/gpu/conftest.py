"""A small model on a GPU, and one way to train it anywhere. What runs here runs with deterministic algorithms.

Without a GPU, TIERING_GPU_TESTS=fake runs what does not ask CUDA itself in the ways of a GPU, on the CPU and with the
streams of the fake device (tests/fakes/fake_device.py): so that no test is found broken only where there is a GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tiering.placement.plan import Plan
from tiering.storage import arena
from tiering.telemetry import Snapshot
from zero3.engine.engine import Engine

FAKE = os.environ.get("TIERING_GPU_TESTS") == "fake"
DEVICE = torch.device("cpu", 0) if FAKE else torch.device("cuda")
VOCABULARY, SEQUENCE, WIDTH, LAYERS = 512, 32, 128, 4
LR, DECAY = 1e-3, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(stream))))
        return stream + hidden


class SmallModel(nn.Module):
    """Tied embedding and head (a large group with two entries), blocks, small persistent parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Trained:
    """What a run left behind."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    snapshot: Snapshot
    plan: Plan

    def differing(self, other: Trained) -> list[str]:
        """The names of weights and masters that are not the same on both sides, to the bit."""
        differences = []
        for kind, mine, theirs in (
            ("weight", self.weights, other.weights),
            ("master", self.masters, other.masters),
        ):
            assert mine.keys() == theirs.keys()
            differences += [
                f"{kind} {key}" for key in mine if not _bytes(mine[key]).equal(_bytes(theirs[key]))
            ]
        return differences


def batches(count: int, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator, device="cpu")
        tokens = tokens.to(DEVICE)
        yield tokens[:, :-1], tokens[:, 1:]


def config(
    nvme: Path,
    *,
    precision: str = "bf16",
    accumulation: int = 1,
    offload_param: str = "none",
    offload_optimizer: str = "none",
    threshold: int = 1000,
    sub_group_size: int = 10**9,
    prefetch: int = 10**6,
    clip: float = 1.0,
    ratio: float = 1.0,
    **tiers: Any,
) -> dict[str, Any]:
    """A configuration as a user writes it; keyword arguments left over go to the ``tiering`` block."""

    def section(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": str(nvme)} if device == "nvme" else {})

    # A machine that is lent for an hour may have no other: what is measured here is not its speed.
    tiers["io"] = {"allow_memory_file_system": True} | tiers.get("io", {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": section(offload_param),
            "offload_optimizer": section(offload_optimizer) | {"ratio": ratio},
            "sub_group_size": sub_group_size,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_param_persistence_threshold": threshold,
        },
        "tiering": {"device_budget": "64MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}}
        | tiers,
    }


@contextmanager
def no_wait() -> Iterator[None]:
    """Within the block, an operation of torch that lets the CPU wait for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if FAKE and request.path.name == "test_kernels.py":
        pytest.skip("no CUDA device: these tests launch kernels, and the device is simulated")
    if not FAKE and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TIERING_DEVICE", DEVICE.type)
    # A lease that nobody gives back shows as an ArenaError, not as a test that hangs.
    monkeypatch.setattr(arena, "STARVED_AFTER_SECONDS", 10.0)
    torch.use_deterministic_algorithms(True)
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        if FAKE:
            from tests.fakes.fake_device import FakeDevice

            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # for models as small as these, threads only wait for each other
            # A GPU's is correctly rounded, as the kernels' is; torch's on a CPU is not.
            sqrt = Tensor.sqrt
            monkeypatch.setattr(Tensor, "sqrt", lambda tensor: sqrt(tensor.double()).float())
            empty = torch.empty  # nothing is pinned where there is no GPU
            monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
            # Orders are not looked at: test_streams_order.py does.
            FakeDevice().run_engines(monkeypatch)
        yield


@pytest.fixture
def cuda() -> None:
    """For tests that ask CUDA itself."""
    if FAKE:
        pytest.skip("no CUDA device: this test calls CUDA, and the device is simulated")


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def build(nvme: Path) -> Callable[..., Engine]:
    """``build(model=None, **config)`` makes an engine that nobody else knows of."""

    def make(model: nn.Module | None = None, **options: Any) -> Engine:
        if model is None:
            torch.manual_seed(3)
            model = SmallModel()
        return tiering.initialize(model=model, config=config(nvme, **options)).engine

    return make


@pytest.fixture
def start(build: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """``start(model=None, **config)`` makes an engine; it is closed after the test."""
    engines: list[Engine] = []

    def make(model: nn.Module | None = None, **options: Any) -> Engine:
        engines.append(build(model, **options))
        return engines[-1]

    yield make
    while engines:
        engines.pop().close()


@pytest.fixture
def train(start: Callable[..., Engine]) -> Callable[..., Trained]:
    """``train(steps=5, model=None, **config)`` trains to the end and returns what is left."""

    def run(steps: int = 5, model: nn.Module | None = None, **options: Any) -> Trained:
        engine = start(model, **options)
        losses, norms = [], []
        for tokens, targets in batches(steps * engine.settings.gradient_accumulation_steps):
            loss = engine(tokens, targets)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        trained = Trained(
            losses, norms, engine.state_dict(), engine.master_state_dict(), engine.snapshot(), engine.plan
        )
        engine.close()
        return trained

    return run


@pytest.fixture
def same() -> Callable[[Trained, Trained, str], None]:
    """``same(run, reference, name)`` asserts that two runs agree to the bit in everything they computed."""

    def check(run: Trained, reference: Trained, name: str) -> None:
        assert run.losses == reference.losses, name
        assert run.norms == reference.norms, name
        assert run.differing(reference) == [], name

    return check


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def small_model() -> type[SmallModel]:
    return SmallModel


@pytest.fixture
def micro_batches() -> Callable[..., Iterator[tuple[Tensor, Tensor]]]:
    return batches
