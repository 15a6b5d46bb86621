"""Promise 1 on a GPU: device, host and NVMe placements of a small model give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tiering.errors import PlacementError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

VOCABULARY, SEQUENCE, WIDTH = 512, 32, 128
PLACEMENTS = {
    "host": ("cpu", "cpu", {}),
    "optimizer on host": ("none", "cpu", {}),
    "optimizer on nvme": ("none", "nvme", {"cache_in_host": False}),
    "all on nvme": ("nvme", "nvme", {"cache_in_host": False}),
    "room for few groups": ("nvme", "nvme", {"cache_in_host": False, "device_budget": "1MiB"}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(stream))))
        return stream + hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("TIERING_DEVICE", "cuda")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(
    directory: Path,
    precision: str,
    accumulation: int,
    placement: tuple[str, str, dict[str, Any]],
    steps: int = 5,
) -> Any:
    param, optimizer, tiers = placement

    def section(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": str(directory)} if device == "nvme" else {})

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": section(param),
            "offload_optimizer": section(optimizer),
            "stage3_param_persistence_threshold": 1000,
        },
        "tiering": {"device_budget": "64MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}}
        | tiers,
    }
    torch.manual_seed(3)
    engine = tiering.initialize(model=Model(), config=config).engine
    generator = torch.Generator().manual_seed(1)
    losses = []
    try:
        for _ in range(steps * accumulation):
            tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator).cuda()
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses, engine.get_global_grad_norm(), engine.state_dict(), engine.master_state_dict()
    finally:
        engine.close()


def least_host_budget(directory: Path, precision: str, accumulation: int) -> str:
    """The smallest budget that the plan accepts: gradients stream then, too."""
    for kib in range(128, 16384, 64):
        tiers = {"cache_in_host": False, "host_budget": f"{kib}KiB"}
        try:
            train(directory, precision, accumulation, ("nvme", "nvme", tiers), steps=0)
        except PlacementError:
            continue
        return f"{kib}KiB"
    raise AssertionError("no host budget is accepted")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_placement_gives_the_same_bits(tmp_path: Path, precision: str, accumulation: int) -> None:
    losses, norm, weights, masters = train(tmp_path, precision, accumulation, ("none", "none", {}))
    assert losses[-1] < losses[0]
    least = {"cache_in_host": False, "host_budget": least_host_budget(tmp_path, precision, accumulation)}
    for name, placement in {**PLACEMENTS, "least host memory": ("nvme", "nvme", least)}.items():
        seen, seen_norm, seen_weights, seen_masters = train(tmp_path, precision, accumulation, placement)
        assert seen == losses, name
        assert seen_norm == norm, name
        assert all(torch.equal(seen_weights[key], weights[key]) for key in weights), name
        assert all(torch.equal(seen_masters[key], masters[key]) for key in masters), name
