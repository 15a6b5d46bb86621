"""Values that are on another tier are never read as something else: every road to them that brings none is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from tests.zero3.plain import STREAMED, WIDTH, differing, inputs, update
from tiering.errors import EngineStateError
from zero3.device import nan_memory, storages
from zero3.device.storages import exchange_pointers

Start = Callable[..., Any]
Reader = Callable[["Reading", Tensor], Tensor]
NAMED = r"Cannot access data pointer|'blocks\.0'"  # torch's own message, or where torch takes one, ours


class Reading(nn.Module):
    """Blocks that leave views of their weights behind, and a model that may read one."""

    class Block(nn.Module):
        class Output:  # an object that torch's containers do not know
            def __init__(self, stream: Tensor, weight: Tensor) -> None:
                self.stream, self.weight = stream, weight

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Output:
            self.kept = self.layer.weight.detach()
            return self.Output(torch.tanh(self.layer(x)), self.layer.weight.t())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.read: Reader | None = None
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = []
        for block in self.blocks:
            self.outputs.append(block(x))
            x = self.outputs[-1].stream
        if self.read is not None:
            x = x * self.read(self, x)
        return x.square().mean()


def by_an_attribute(model: Reading, x: Tensor) -> Tensor:
    tensor: Tensor = model.get_submodule("blocks.0").kept
    return tensor.square().mean()


def by_an_output(model: Reading, x: Tensor) -> Tensor:
    mean: Tensor = (x @ model.outputs[0].weight).mean()
    return mean


def past_torch_function(model: Reading, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return model.get_parameter("blocks.0.layer.weight").norm()


def by_numpy(model: Reading, x: Tensor) -> Tensor:
    tensor: Tensor = model.get_submodule("blocks.0").kept
    return torch.tensor(float(tensor.numpy().sum()))


def by_writing(model: Reading, x: Tensor) -> Tensor:
    tensor: Tensor = model.get_submodule("blocks.0").kept
    return tensor.add_(1).mean()


ROADS = [by_an_attribute, by_an_output, past_torch_function, by_numpy, by_writing]


def engine_of(start: Start, **options: Any) -> Any:
    torch.manual_seed(5)
    return start(Reading(), precision="fp32", accumulation=1, threshold=0, **options)


@pytest.fixture
def open_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that cannot refuse reads."""
    monkeypatch.setattr(storages, "can_close", lambda: False)


def test_this_torch_can_close_a_storage() -> None:
    """With it, nothing else here is skipped: an older one may lack it, and has NaN instead."""
    if torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} may lack the mark that closes a storage; 2.13 has it")
    assert storages.can_close()


def test_a_closed_storage_is_open_while_it_has_other_memory() -> None:
    closed, lease = torch.zeros(4), torch.arange(4.0)
    view = closed[2:]
    closed.untyped_storage().resize_(0)
    storages.close_storage(closed, "a tensor")
    for _ in range(2):
        for use in (view.sum, view.zero_, view.numpy, view.data_ptr):
            with pytest.raises(RuntimeError, match=r"Cannot access data pointer|a tensor was read"):
                use()
        exchange_pointers(closed, lease)
        assert view.tolist() == [2, 3]
        exchange_pointers(closed, lease)
        assert lease.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("prefetch", [0, 10**6])
@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_a_read_that_brings_no_bytes_is_an_error(start: Start, road: Reader, prefetch: int) -> None:
    """And what comes after it is as without it."""
    resident, moving = engine_of(start), engine_of(start, prefetch=prefetch, **STREAMED)
    undisturbed = engine_of(start)
    for number, x in enumerate(inputs(3)):
        if number == 1:
            moving.module.read = road
            with pytest.raises(RuntimeError, match=NAMED) as caught:
                moving(x)
            words = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
            assert "[TIER-RESIDENT]" in words and "weight.detach().clone()" in words
            moving.module.read = None
        assert update(moving, x) == update(undisturbed, x)
    assert differing(moving.master_state_dict(), undisturbed.master_state_dict()) == []
    if road is not by_writing:
        resident.module.read = road
        assert resident(torch.ones(2, WIDTH)).isfinite()


def test_a_gradient_given_by_a_parameter_that_is_elsewhere(start: Start) -> None:
    """Torch asks nobody about the class of grad_outputs."""
    engine = engine_of(start, **STREAMED)
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    weight = engine.module.blocks[0].layer.weight
    with pytest.raises(RuntimeError, match=NAMED):
        torch.autograd.grad(2 * x, x, weight)


def test_a_parameter_of_a_closed_engine(start: Start) -> None:
    for placement in ({}, STREAMED):
        engine = engine_of(start, **placement)
        update(engine, torch.ones(2, WIDTH))
        tensor = engine.module.blocks[0].kept
        engine.close()
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=NAMED):
            engine.module.blocks[0].layer.weight.norm()
        del tensor


def test_the_profiler_sees_all_shapes(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    """It looks at the memory of whatever is given to an operation of torch."""

    def shapes(**options: Any) -> list[str]:
        engine = engine_of(start, **options)
        for x in inputs(1):
            update(engine, x)
        with profile(record_shapes=True, profile_memory=True) as profiler:
            for x in inputs(2):
                update(engine, x)
        return [str(event.input_shapes) for event in profiler.events() if event.name == "aten::addmm"]

    assert shapes(prefetch=0, **STREAMED) == shapes()
    assert "Exception" not in capfd.readouterr().err


@pytest.mark.usefixtures("open_storages")
def test_where_torch_refuses_nothing_a_kept_view_reads_nan(start: Start) -> None:
    engine = engine_of(start, **STREAMED)
    x = torch.ones(4, WIDTH)
    engine(x)
    tensor = engine.module.blocks[0].kept
    assert tensor.isnan().all() and tensor.shape == (WIDTH, WIDTH)
    tensor.add_(1)  # goes nowhere
    with pytest.raises(EngineStateError, match=r"'blocks\.0\.layer\.weight' was changed in place through"):
        engine(x)
    assert torch.isfinite(engine(x)), "the engine is not usable after that"
    update(engine, x)


@pytest.mark.usefixtures("open_storages")
@pytest.mark.parametrize("mapped", [True, False], ids=["NaN", "no memory of NaN"])
def test_where_torch_refuses_nothing_training_is_the_same(
    start: Start, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mapped:
        monkeypatch.setattr(nan_memory, "map_nan", lambda nbytes: None)
    expected, moving = engine_of(start), engine_of(start, prefetch=0, **STREAMED)
    assert [update(expected, x) for x in inputs(3)] == [update(moving, x) for x in inputs(3)]
    assert differing(expected.master_state_dict(), moving.master_state_dict()) == []
