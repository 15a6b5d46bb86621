"""Experts that share parameters, as those of transformers do, are fetched one by one, if tokens are routed to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiering
from tests.zero3.experts import EXPERTS, LAYERS, WIDTH, FusedModel, fused_model
from tests.zero3.inside import wait_for_transfers
from tiering.errors import ResidencyError
from zero3.params.fused_experts import Experts
from zero3.params.layout import Piece, expert_slices, lay_out
from zero3.setup import model_size

NVME = {"offload_param": "nvme", "cache_in_host": False}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "nvme": NVME,
    "nvme, nothing ahead": {**NVME, "prefetch": 0},
    "nvme, much ahead": {**NVME, "prefetch": 10**5},
    "nvme, part cached": {"offload_param": "nvme", "host_budget": "300KiB"},
}
HABIT: dict[str, Any] = {"accumulation": 1, "threshold": 600, "prefetch": 1}
FEW, MANY = (1, 12), (1, 30, 2, 40, 40, 40, 1)
MATRIX_BYTES = 2 * WIDTH * WIDTH
EXPERT_BYTES = 2 * MATRIX_BYTES


def routes(rows: int, seed: int) -> Tensor:
    """Two experts for each of ``rows`` in each layer."""
    generator = torch.Generator().manual_seed(seed)
    each = [torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(LAYERS * rows)]
    return torch.stack(each).view(LAYERS, rows, 2)


def run(engine: Any, rows: int, seed: int, *, training: bool) -> float:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator).to(torch.bfloat16)
    if not training:
        with torch.no_grad():
            return engine(x, routes(rows, seed)).item()
    loss = engine(x, routes(rows, seed))
    engine.backward(loss)
    engine.step()
    return loss.item()


def check_alike(
    start: Callable[..., Any], places: list[str], build: Callable[[], FusedModel], rows: Sequence[int]
) -> None:
    """Passes with ``rows``, few and many, have the same bits; losses, masters and weights."""
    results = []
    for place in places:
        engine = start(build(), **{**HABIT, **PLACES[place]})
        losses = [run(engine, each, each, training=training) for training in (True, False) for each in rows]
        results.append((losses, engine.master_state_dict() | engine.state_dict()))
        assert engine.plan.working_bytes < EXPERTS * EXPERT_BYTES
        engine.close()
    for losses, values in results[1:]:
        assert losses == results[0][0]
        assert [name for name in values if not torch.equal(values[name], results[0][1][name])] == []


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "indexed"])
def test_fused_experts_compute_the_same_bits_where_one_fits_at_a_time(
    start: Callable[..., Any], grouped: bool
) -> None:
    check_alike(start, ["device", "nvme, nothing ahead"], lambda: fused_model(grouped=grouped), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "indexed"])
def test_fused_experts_compute_the_same_bits_everywhere(
    start: Callable[..., Any], grouped: bool, checkpointed: bool
) -> None:
    check_alike(start, list(PLACES), lambda: fused_model(grouped=grouped, checkpointed=checkpointed), MANY)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "indexed"])
def test_fused_experts_compute_the_same_bits_where_reads_are_copied(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    """As on a GPU: through a window in host memory, and into memory that the engine counts."""
    places = ["device", "nvme, nothing ahead", "nvme", "nvme, much ahead"]
    monkeypatch.setattr(model_size, "can_exchange", lambda: False)
    check_alike(start, places, lambda: fused_model(grouped=grouped), MANY)


@pytest.mark.parametrize(
    ("grouped", "training"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_pass_reads_the_bytes_of_its_experts(
    start: Callable[..., Any], grouped: bool, training: bool
) -> None:
    engine = start(fused_model(grouped=grouped), **{**HABIT, **NVME})

    def read_bytes() -> int:
        wait_for_transfers(engine)
        return sum(path.read.bytes for path in engine.snapshot().io)

    dense = sum(
        group.layout.numel * group.dtype.itemsize
        for group in engine._groups
        if group.moves and group.routing is None
    )
    for seed in range(3):
        run(engine, 1, seed, training=training)
    before = read_bytes()
    used = 0
    for rows in (1, 2, 3):
        run(engine, rows, rows, training=training)
        used += sum(len(each.unique()) for each in routes(rows, rows))
    uses = 2 if training else 1
    assert read_bytes() - before == uses * (3 * dense + used * EXPERT_BYTES)
    # The device has room for the dense part of two blocks and for two experts.
    assert engine.plan.working_bytes < 4 * EXPERT_BYTES < EXPERTS * EXPERT_BYTES


def test_reads_of_experts_in_every_form(start: Callable[..., Any]) -> None:
    """In a forward: by number, by tensors, transposed. The whole parameter has no room, and says what to do."""
    model = fused_model(grouped=False)
    weight = model.layers[1].experts.up_proj
    expected = weight.detach().to(torch.bfloat16)
    found: dict[str, Tensor] = {}

    def read(*_: object) -> None:
        found["number"] = weight[3] + 0
        found["negative"] = weight[-1] + 0
        found["tensor"] = weight[torch.tensor(5)] + 0
        found["several"] = weight[torch.tensor([5, 0, 5])]
        found["transposed"] = weight.mT[2] + 0
        found["transposed twice"] = weight.transpose(1, 2).transpose(-1, -2)[2] + 0
        found["several transposed"] = weight.transpose(-2, -1)[torch.tensor([1, 6])]
        assert weight.transpose(1, 2).shape == (EXPERTS, WIDTH, WIDTH)
        with pytest.raises(IndexError):
            weight[EXPERTS]
        with pytest.raises(ResidencyError, match="name the module in leaf_module"):
            weight.sum()

    model.layers[1].experts.register_forward_pre_hook(read)
    run(start(model, **{**HABIT, **NVME}), 1, 0, training=False)
    turned = expected.transpose(1, 2)
    assert torch.equal(found["number"], expected[3])
    assert torch.equal(found["negative"], expected[-1])
    assert torch.equal(found["tensor"], expected[5])
    assert torch.equal(found["several"], expected[[5, 0, 5]])
    assert torch.equal(found["transposed"], turned[2])
    assert torch.equal(found["transposed twice"], expected[2])
    assert torch.equal(found["several transposed"], turned[[1, 6]])


def test_experts_show_values_that_were_set_and_are_released(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    engine = start(fused_model(grouped=True), **{**HABIT, **NVME})
    weight = engine.module.layers[0].experts.down_proj
    before = run(engine, 4, 0, training=False)
    engine.save_checkpoint(str(tmp_path))
    with tiering.gathered(weight, modify=True), torch.no_grad():
        weight[routes(4, 0)[0, 0, 0]] *= 2
    changed = run(engine, 4, 0, training=False)
    assert changed != before
    values = engine.state_dict()["layers.0.experts.down_proj"].clone()
    engine.load_checkpoint(str(tmp_path))
    assert run(engine, 4, 0, training=False) == before
    with tiering.gathered(weight, modify=True), torch.no_grad():
        weight.copy_(values)
    assert run(engine, 4, 0, training=False) == changed
    model = engine.module
    engine.release()
    assert torch.equal(weight, values)
    assert torch.equal(weight[3], values[3])
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert model(x, routes(4, 0)).item() == changed


def test_an_expert_is_a_range_of_pages_and_a_piece_inside() -> None:
    shapes = [(0, "up", (4, 30, 6), False), (1, "codes", (4, 5000), False)]
    layout = lay_out(shapes, 2, own_dtypes={1: torch.uint8})
    experts = expert_slices(layout, 2, 4)
    assert [[len(each.pages) for each in parts] for parts in experts] == [
        [4096, 8192], [4096, 8192], [4096, 12288], [4096, 8192],
    ]  # fmt: skip
    up, codes = layout.pieces
    assert (up.start, codes.start) == (0, 768)
    # The third expert: 720 bytes from its start in the group, and 5000 bytes from 1536 + 10000.
    third = experts[2]
    assert third[0].piece == Piece(0, "up[2]", 360, (30, 6), 180, False)
    assert third[0].pages == range(4096)
    assert third[1].pages == range(8192, 20480)
    assert third[1].piece == Piece(1, "codes[2]", 1672, (5000,), 2500, False, own_dtype=torch.uint8)


class InMemory(Experts):
    """Experts in a tensor."""

    def __init__(self, matrices: Tensor, *, transposed: bool = False) -> None:
        super().__init__(matrices.shape, transposed=transposed)
        self.dtype, self.device, self.matrices = matrices.dtype, matrices.device, matrices

    def matrix(self, expert: int) -> Tensor:
        return self.matrices[expert].mT if self.transposed else self.matrices[expert]

    def values(self, expert: int) -> Tensor:
        return self.matrices[expert]

    def whole(self) -> Tensor:
        return self.matrices.mT if self.transposed else self.matrices

    def turned(self) -> InMemory:
        return InMemory(self.matrices, transposed=not self.transposed)


def test_backward_takes_the_offsets_that_were_saved() -> None:
    """As torch's grouped_mm: a recomputation may have routed the rows to other experts than the forward."""
    torch.manual_seed(2)
    matrices, y = torch.randn(3, 8, 16), torch.randn(6, 16)
    ends, others = (torch.tensor(each, dtype=torch.int32) for each in ([2, 3, 6], [1, 5, 6]))

    def recomputed(saved: Tensor) -> Tensor:
        return others if saved.dtype is torch.int32 else saved

    gradients = []
    for weight in (matrices, InMemory(matrices)):
        x = torch.ones(6, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, recomputed):
            product: Any = torch._grouped_mm(x, weight, offs=ends)
        gradients.append(torch.autograd.grad((product * y).sum(), x)[0])
    assert torch.equal(*gradients)
    assert not torch.equal(
        gradients[0], torch.autograd.grad((torch._grouped_mm(x, matrices, offs=ends) * y).sum(), x)[0]
    )
