"""The engine on a GPU as a training loop meets it: autograd runs its hooks in a thread of its own there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiering
from tiering.errors import ConfigError, EngineStateError, ResidencyError

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

ON_DEVICE: dict[str, Any] = {}
HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = [pytest.param(HOST, id="host"), pytest.param(STREAMED, id="nvme")]


class Mixture(nn.Module):
    """Experts of which a batch uses one; a frozen layer; a module that is used twice; one that is never used."""

    fail = ""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        hidden = self.first(x)
        if self.fail == "forward":
            raise KeyboardInterrupt
        if self.fail == "backward":
            hidden.register_hook(_interrupt)
        hidden = self.experts[expert](torch.tanh(hidden))
        hidden = self.twice(torch.tanh(self.twice(self.frozen(hidden))))
        return (hidden * self.scale).float().pow(2).mean()


def _interrupt(gradient: Tensor) -> None:
    raise KeyboardInterrupt


def mixture() -> Mixture:
    torch.manual_seed(5)
    return Mixture()


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def train_mixture(engine: Any, experts: list[int]) -> list[float]:
    losses = []
    for number, expert in enumerate(experts):
        loss = engine(inputs(number), expert)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def equal(first: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_experts_frozen_shared_and_unused_modules(
    start: Callable[..., Any], placement: dict[str, Any], accumulation: int
) -> None:
    experts = [0, 1, 0, 3, 1, 0, 0, 1]
    resident = start(mixture(), accumulation=accumulation, threshold=0)
    moved = start(mixture(), accumulation=accumulation, threshold=0, **placement)
    before = resident.master_state_dict()
    assert train_mixture(resident, experts) == train_mixture(moved, experts)
    assert moved.get_global_grad_norm() == resident.get_global_grad_norm()
    masters = moved.master_state_dict()
    assert equal(resident.master_state_dict(), masters)
    changed = {name for name in masters if not torch.equal(masters[name], before[name])}
    assert changed == {name for name in masters if name.startswith(("first", "twice")) or name[:9] in
                       {"experts.0", "experts.1", "experts.3"}}  # fmt: skip
    assert equal(resident.state_dict(), moved.state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_activation_checkpointing(
    start: Callable[..., Any], placement: dict[str, Any], reentrant: bool
) -> None:
    class Stack(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
                for _ in range(3)
            )
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=reentrant) if self.checkpointed else block(x))
            return x.float().pow(2).mean()

    def run(checkpointed: bool, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(2)
        engine = start(Stack(checkpointed), threshold=0, **options)
        losses = []
        for step in range(3):
            loss = engine(inputs(step).requires_grad_())
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses, engine.master_state_dict()

    losses, masters = run(False)
    recomputed, same = run(True, **placement)
    assert recomputed == losses
    assert len({*losses}) == 3
    assert equal(masters, same)


@pytest.mark.parametrize("placement", [pytest.param(ON_DEVICE, id="device"), *PLACEMENTS])
def test_gradients_that_are_not_finite_skip_the_step(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture, placement: dict[str, Any]
) -> None:
    engine = start(mixture(), **placement)
    train_mixture(engine, [0])
    before = engine.master_state_dict()
    engine.backward(engine(torch.full((4, 64), float("inf"), dtype=torch.bfloat16, device=DEVICE), 0))
    engine.step()
    assert engine.skipped_steps == 1
    assert "gradient of 'first.weight' is not finite" in caplog.text
    assert equal(engine.master_state_dict(), before)
    train_mixture(engine, [0])
    assert not equal(engine.master_state_dict(), before)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_exception_in_forward_or_backward_leaves_the_engine_usable(
    start: Callable[..., Any], placement: dict[str, Any]
) -> None:
    disturbed = start(mixture(), threshold=0, **placement)
    calm = start(mixture(), threshold=0)
    for where in ("forward", "backward"):
        disturbed.module.fail = where
        with pytest.raises(KeyboardInterrupt):
            disturbed.backward(disturbed(inputs(9), 1))
        disturbed.module.fail = ""
        unsharded = [group.name for group in disturbed._groups if group.residency.name == "UNSHARDED"]
        assert unsharded == [], f"still unsharded after an exception in {where}"
    assert train_mixture(disturbed, [0, 1, 2]) == train_mixture(calm, [0, 1, 2])
    assert equal(disturbed.master_state_dict(), calm.master_state_dict())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_evaluation_between_steps_changes_nothing(
    start: Callable[..., Any], train: Callable[..., Any], micro_batches: Any, placement: dict[str, Any]
) -> None:
    reference = train(3)
    engine = start(**placement)
    losses = []
    for tokens, targets in micro_batches(3):
        with torch.no_grad():
            first = engine.eval()(tokens, targets).item()
        loss = engine.train()(tokens, targets)
        assert loss.item() == first
        losses.append(first)
        engine.backward(loss)
        engine.step()
    assert losses == reference.losses


@pytest.mark.usefixtures("cuda")  # .cpu() of what is on the CPU asks for no bytes
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_resharded_parameter_raises_and_says_what_to_do(
    start: Callable[..., Any], placement: dict[str, Any]
) -> None:
    engine = start(**placement)
    weight = engine.module.blocks[0].up.weight
    assert (weight.device.type, weight.shape) == (DEVICE.type, (512, 128))
    for access in (lambda: torch.isnan(weight), lambda: weight.add_(1), lambda: weight.cpu()):
        with (
            torch.no_grad(),
            pytest.raises(ResidencyError, match=r"blocks\.0\.up\.weight.*tiering\.gathered"),
        ):
            access()
    expected = engine.state_dict()["blocks.0.up.weight"]
    assert torch.isfinite(expected).all()
    with tiering.gathered(weight):
        assert weight.device.type == DEVICE.type
        assert torch.equal(weight.cpu(), expected)


@pytest.mark.parametrize("placement", [pytest.param(ON_DEVICE, id="device"), *PLACEMENTS])
def test_a_graph_of_before_the_step_is_refused_after_it(
    start: Callable[..., Any], micro_batches: Any, placement: dict[str, Any]
) -> None:
    engine = start(**placement)
    tokens, targets = next(micro_batches(1))
    loss, stale = engine(tokens, targets), engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(stale)
    engine.backward(engine(tokens, targets))
    engine.step()
    assert engine.global_steps == 2


def test_loss_backward_explains_itself_for_more_than_one_micro_batch(
    start: Callable[..., Any], micro_batches: Any
) -> None:
    several = start(accumulation=2, **STREAMED)
    tokens, targets = next(micro_batches(1))
    with pytest.raises(EngineStateError, match=r"call engine\.backward\(loss\)"):
        several(tokens, targets).backward()
    several.backward(several(tokens, targets))


@pytest.mark.usefixtures("cuda")
def test_pinning_data_workers_neither_disturb_nor_hang(
    start: Callable[..., Any], train: Callable[..., Any], micro_batches: Any
) -> None:
    """Forked after CUDA has started, as every training loop does it: the arena is not theirs."""
    reference = train(2)
    engine = start(**STREAMED)
    samples = [(tokens[i].cpu(), targets[i].cpu()) for tokens, targets in micro_batches(2) for i in range(4)]
    workers = torch.utils.data.DataLoader(
        samples, batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context="fork"
    )
    for tokens, targets in workers:
        engine.backward(engine(tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)))
        engine.step()
    assert equal(engine.master_state_dict(), reference.masters)


def test_two_engines_share_a_gpu(
    start: Callable[..., Any], train: Callable[..., Any], micro_batches: Any
) -> None:
    alone = train(2)
    engines = [start(**HOST), start(**STREAMED)]
    for tokens, targets in micro_batches(2):
        losses = [engine(tokens, targets) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
    for engine in engines:
        assert equal(engine.master_state_dict(), alone.masters)


def test_what_a_gpu_cannot_do_yet_is_refused(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="without offload_optimizer is not supported"):
        start(offload_param="nvme")


@pytest.mark.parametrize("placement", [pytest.param(ON_DEVICE, id="device"), *PLACEMENTS])
def test_zero_init_starts_from_the_values_of_an_ordinary_build(
    start: Callable[..., Any],
    train: Callable[..., Any],
    small_model: Callable[[], nn.Module],
    placement: dict[str, Any],
) -> None:
    torch.manual_seed(3)
    ordinary = start(small_model()).master_state_dict()
    torch.manual_seed(3)
    with tiering.zero.Init():
        model = small_model()
    engine = start(model, **placement)
    assert equal(engine.master_state_dict(), ordinary)
    assert engine.module.norm.weight.device.type == DEVICE.type
