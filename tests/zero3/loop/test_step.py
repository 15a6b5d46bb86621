"""When gradients are final: what has to wait for the end of backward with step_in_backward, and what need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero3.plain import ADAM, STREAMED, WIDTH, Tower, differing, inputs, run_engine, update
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.param_group import ParamGroup

Start = Callable[..., Any]

IN_BACKWARD = {"step_in_backward": True, "clip": 0.0}


class OneCheckpointed(Tower):
    """Only the second block is checkpointed, reentrantly, and called twice: around the first, which is entered from
    behind when the second has all its gradients and gets more."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index in (1, 0, 1, 2):
            block = self.blocks[index]
            if index != skip:
                x = x + (checkpoint(block, x, use_reentrant=True) if index == 1 else block(x))
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that were stepped before backward had ended, in order."""
    names: list[str] = []
    group_done = TieredOptimizer.group_done

    def noted(self: TieredOptimizer, group: ParamGroup, *, final: bool) -> None:
        names.extend([group.name] * final)
        group_done(self, group, final=final)

    monkeypatch.setattr(TieredOptimizer, "group_done", noted)
    return names


@pytest.mark.parametrize("place", [{}, STREAMED], ids=["device", "nvme"])
def test_a_block_that_gets_gradients_in_backwards_inside_of_backward_waits(
    start: Start, early: list[str], place: dict[str, Any]
) -> None:
    def script(loop: Any) -> list[float]:
        return [update(loop, x) for x in inputs(3)]

    after = run_engine(start, OneCheckpointed, script, precision="bf16", clip=0.0)
    during = run_engine(start, OneCheckpointed, script, precision="bf16", **IN_BACKWARD, **place)
    assert during.losses == after.losses
    assert differing(during.masters, after.masters) == []
    assert "blocks.1" not in early


@pytest.mark.parametrize("place", [{}, STREAMED], ids=["device", "nvme"])
def test_a_backward_does_not_end_with_the_backward_of_a_checkpoint(
    start: Start, place: dict[str, Any]
) -> None:
    """A block that the script calls itself is recomputed before the engine sees a gradient of the model's output."""

    def script(loop: Any, *, recomputed: bool) -> list[float]:
        losses = []
        for x in inputs(4):
            loss = loop(x)
            block, inner = loop.module.blocks[1], x.clone().requires_grad_()
            term = checkpoint(block, inner, use_reentrant=True) if recomputed else block(inner)
            loss = loss + term.float().square().mean()
            losses.append(loss.item())
            loop.backward(loss)
            loop.step()
        return losses

    def run(recomputed: bool) -> Any:
        both = {"precision": "fp32", "accumulation": 2, "threshold": 10**6}
        return run_engine(start, Tower, lambda loop: script(loop, recomputed=recomputed), **both, **place)

    expected, found = run(False), run(True)
    # Two gradients are added up in another place.
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


class AllCheckpointed(Tower):
    """Each block is computed again in backward, within it: that is no second call."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class Twice(Tower):
    """As OneCheckpointed without the checkpoint: all gradients of the second block come at once."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index in (1, 0, 1, 2):
            x = x + self.blocks[index](x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


def with_an_unused_parameter() -> nn.Module:
    """It is trained, and gets no gradient: nothing tells that none comes."""
    model = Tower()
    model.get_submodule("blocks.1.1").unused = nn.Parameter(torch.ones(WIDTH))
    return model


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Tower, ["blocks.2", "blocks.1", "blocks.0"]),
        (with_an_unused_parameter, ["blocks.2", "blocks.0"]),
        (Twice, ["blocks.2", "blocks.0"]),
        (AllCheckpointed, ["blocks.2", "blocks.1", "blocks.0"]),
    ],
    ids=[
        "each is called once",
        "a parameter without gradient",
        "called twice",
        "checkpointed",
    ],
)
@pytest.mark.parametrize("place", [{}, STREAMED], ids=["device", "nvme"])
def test_what_is_stepped_before_backward_ends(
    start: Start, early: list[str], build: Callable[[], nn.Module], expected: list[str], place: dict[str, Any]
) -> None:
    torch.manual_seed(11)
    options = {"precision": "bf16", "accumulation": 2, "threshold": 0, "optimizer": ADAM}
    engine = start(build(), **options, **IN_BACKWARD, **place)
    first, second, third = inputs(3)
    for x in (first, second):
        assert early == []
        update(engine, x)
    assert [name for name in early if name.startswith("blocks")] == expected
    early.clear()
    update(engine, third)
    assert early == []


def test_a_bad_option_is_refused_before_anything_is_stepped(start: Start) -> None:
    options = {"precision": "bf16", "accumulation": 1, "threshold": 0, "optimizer": ADAM}
    torch.manual_seed(11)
    engine = start(Tower(), **options, **IN_BACKWARD)
    before, x = engine.master_state_dict(), next(inputs(1))
    engine.optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError, match="param group 0"):
        engine.backward(engine(x))
    assert differing(engine.master_state_dict(), before) == []
    engine.optimizer.param_groups[0]["lr"] = ADAM["lr"]
    update(engine, x)
    assert differing(engine.master_state_dict(), before) == sorted(before)


class FarPeeking(Tower):
    """The first block computes with a weight of the last one, and asks for no gradient of it."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        x = x + self.blocks[0](x) + nn.functional.linear(x, self.blocks[2][1].weight.detach())[:, :WIDTH]
        for index in (1, 2):
            x = x + self.blocks[index](x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


@pytest.mark.parametrize("place", [{}, STREAMED], ids=["device", "nvme"])
def test_a_value_that_was_updated_too_early_is_not_used(start: Start, place: dict[str, Any]) -> None:
    """It has another version: torch refuses it, where a wrong gradient would tell nobody."""
    engine = start(FarPeeking(), precision="bf16", accumulation=1, threshold=0, **IN_BACKWARD, **place)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(engine(next(inputs(1))))
