"""A block that does not fit on the device is cut into its modules, which changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero3.plain import PLACEMENTS, STREAMED
from tiering.errors import PlacementError
from zero3.engine.engine import Engine

Start = Callable[..., Engine]
WIDTH, ROWS = 32, 8


class Block(nn.Module):
    """``up`` is called, the weight of ``read`` is used by the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(self.norm(stream))))
        return stream + result + nn.functional.linear(stream, self.read.weight)


class Model(nn.Module):
    def __init__(self, blocks: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3 * WIDTH)
        self._checkpointed = checkpointed

    def forward(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False) if self._checkpointed else block(stream)
        return self.head(stream).square().mean()


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def trained(engine: Engine, steps: int = 3) -> tuple[dict[str, Tensor], list[float | None]]:
    generator, norms = torch.Generator().manual_seed(1), []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(ROWS, WIDTH, generator=generator).bfloat16()))
        if engine.is_gradient_accumulation_boundary():
            norms.append(engine.get_global_grad_norm())
        engine.step()
    return engine.master_state_dict(), norms


def names(engine: Engine) -> list[str]:
    return [group.name for group in engine.plan.workload.groups]


def largest(engine: Engine) -> int:
    """Bytes on the device for the largest group of the plan."""
    load = engine.plan.workload
    return max(map(load.unsharded_bytes, load.groups))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_cut_changes_no_bit(start: Start, place: str, checkpointed: bool) -> None:
    whole = start(model(), threshold=0, **PLACEMENTS[place])
    expected, norms = trained(whole)
    assert names(whole) == ["blocks.0", "blocks.1", "blocks.2", "root"]
    room = largest(whole)
    # On a CPU, parameters in host memory are not fetched, so no budget is too small for them.
    options = PLACEMENTS[place] if place != "cpu" else STREAMED
    cut = start(model(checkpointed=checkpointed), threshold=0, device_budget=room - 4096, **options)
    assert names(cut)[:4] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.0.read"]
    assert largest(cut) < room - 4096
    masters, norms_of_cut = trained(cut)
    assert norms_of_cut == norms and len(set(norms)) == 3
    assert all(torch.equal(masters[name], values) for name, values in expected.items())


def with_keys(start: Start, **zero: Any) -> Engine:
    """An engine of ``model()`` on NVMe with further keys of ``zero_optimization``."""
    return start(model(), threshold=0, zero=zero, prefetch=10**6, **STREAMED)


def test_live_parameters_bound_the_groups_and_what_is_fetched_ahead(start: Start) -> None:
    """A block has 9,440 elements, its largest module 4,224, and what is padded to pages 6,144."""
    whole = with_keys(start, stage3_max_live_parameters=2 * 9440)
    assert names(whole)[:2] == ["blocks.0", "blocks.1"]
    cut = with_keys(start, stage3_max_live_parameters=2 * 9440 - 1)
    assert names(cut)[:2] == ["blocks.0.norm", "blocks.0.up"]
    expected, norms = trained(whole)
    masters, norms_of_cut = trained(cut)
    assert norms_of_cut == norms
    assert all(torch.equal(masters[name], values) for name, values in expected.items())
    # In bf16, beside the largest group.
    prefetched = [engine.plan.workload.prefetch_bytes for engine in (whole, cut)]
    assert prefetched == [2 * 2 * 9440 - largest(whole), 2 * (2 * 9440 - 1) - largest(cut)]
    assert with_keys(start, stage3_max_live_parameters=0).plan.workload.prefetch_bytes == 2 * 10**6
    assert with_keys(start, stage3_max_live_parameters=1).plan.workload.prefetch_bytes == 0


def test_parameters_that_do_not_move_are_not_live(start: Start) -> None:
    engine = start(model(), threshold=0, stage=2, zero={"stage3_max_live_parameters": 1})
    assert names(engine)[:2] == ["blocks.0", "blocks.1"]


def test_modules_of_fine_grain_stay_together(start: Start) -> None:
    """A block has 9,440 parameters in 5 modules: 1,888 for each."""
    finest: dict[str, Any] = {"stage3_max_live_parameters": 1}
    together = with_keys(start, stage3_module_granularity_threshold=1889, **finest)
    assert names(together)[:3] == ["blocks.0", "blocks.1", "blocks.2"]
    apart = with_keys(start, stage3_module_granularity_threshold=1888, **finest)
    assert names(apart)[:2] == ["blocks.0.norm", "blocks.0.up"]


def test_the_least_device_budget_is_that_of_the_cut(start: Start) -> None:
    whole = start(model(), threshold=0, **STREAMED)
    room = largest(whole)
    cut = start(model(), threshold=0, device_budget=room - 4096, **STREAMED)
    least = largest(cut)
    trained(start(model(), threshold=0, device_budget=least, prefetch=0, **STREAMED), steps=1)
    with pytest.raises(PlacementError, match=r"the largest group, 'blocks\.0\.\w+', needs .* on the device"):
        start(model(), threshold=0, device_budget=least - 4096, prefetch=0, **STREAMED)


def test_only_blocks_that_do_not_fit_are_cut(start: Start) -> None:
    class Wide(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    mixed = model()
    mixed.blocks.insert(1, Wide())
    whole = start(mixed, threshold=0, **STREAMED)
    room = largest(whole)
    mixed = model()
    mixed.blocks.insert(1, Wide())
    cut = start(mixed, threshold=0, device_budget=room - 4096, **STREAMED)
    assert names(cut)[:2] == ["blocks.0", "blocks.1.norm"] and "blocks.2" in names(cut)


def test_checkpoints_load_across_cuts(start: Start, tmp_path: Path) -> None:
    whole = start(model(), threshold=0, **STREAMED)
    room = largest(whole)
    trained(whole, steps=2)
    whole.save_checkpoint(tmp_path, tag="whole")
    expected, _ = trained(whole, steps=2)
    cut = start(model(), threshold=0, device_budget=room - 4096, **STREAMED)
    cut.load_checkpoint(tmp_path, tag="whole")
    masters, _ = trained(cut, steps=2)
    assert all(torch.equal(masters[name], values) for name, values in expected.items())
    cut.save_checkpoint(tmp_path, tag="cut")
    whole.load_checkpoint(tmp_path, tag="cut")
    assert all(torch.equal(whole.master_state_dict()[name], values) for name, values in masters.items())


def test_chunks_of_rows_keep_their_blocks_whole(start: Start) -> None:
    whole = start(model(), threshold=0, **STREAMED)
    room = largest(whole)
    with pytest.raises(PlacementError, match=r"the largest group, 'blocks\.0', needs"):
        start(model(), threshold=0, device_budget=room - 4096, block_rows=2, **STREAMED)
