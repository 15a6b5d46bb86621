"""Blocks over chunks of rows: the gradients of micro-batches to the bit, once the parameters, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zero3.conftest import SmallModel, same_bits
from tests.zero3.passes.row_stacks import (
    NVME,
    ROWS,
    SEQUENCE,
    WIDTH,
    Balancing,
    Counted,
    Joint,
    Stack,
    Start,
    begin,
    inputs,
    update,
)
from zero3.engine.engine import Engine
from zero3.passes import moved_activations

__all__ = ["begin"]

CHECKPOINTS = ("no", "not reentrant", "reentrant")


def trained(engine: Engine, *, rows: int | None = None) -> dict[str, Tensor]:
    """The masters after three updates; with ``rows``, micro-batches have so many rows."""
    for stream in inputs():
        update(engine, *(stream.split(rows) if rows else [stream]))
    return dict(engine.master_state_dict())


@pytest.mark.one_of(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gradients_have_the_bits_of_micro_batches(
    begin: Callable[..., Engine], precision: str, rows: int
) -> None:
    """Of five rows in chunks of two, the last chunk has one row."""
    by_micro_batches = trained(begin(precision=precision, accumulation=2), rows=rows)
    for place in ({}, NVME, {"offload_optimizer": "cpu"}):
        engine = begin(precision=precision, block_rows=rows, **place)
        assert not same_bits(trained(engine), by_micro_batches)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_each_row_is_computed_twice(begin: Callable[..., Engine], checkpoints: str) -> None:
    """In forward and in backward, whatever the model checkpoints; in a reentrant one, one row for the shapes."""
    by_micro_batches = trained(begin(accumulation=2), rows=2)
    engine = begin(block_rows=2, checkpoints=checkpoints, **NVME)
    # The first step makes the checks.
    update(engine, next(inputs(1)))
    Counted.rows.clear()
    update(engine, next(inputs(1)))
    assert sum(Counted.rows) == 3 * (2 * ROWS + (checkpoints == "reentrant"))
    engine = begin(block_rows=2, checkpoints=checkpoints, **NVME)
    assert not same_bits(trained(engine), by_micro_batches)
    Counted.rows.clear()
    engine = begin(block_rows=ROWS, checkpoints=checkpoints)
    update(engine, next(inputs(1)))
    Counted.rows.clear()
    update(engine, next(inputs(1)))
    assert sum(Counted.rows) == 3 * 2 * ROWS


def test_bytes_on_nvme_do_not_depend_on_chunks(begin: Callable[..., Engine]) -> None:
    traffic = []
    for options, rows in (({}, None), ({"block_rows": 2}, None), ({"block_rows": 1}, None), ({}, 1)):
        engine = begin(precision="bf16", grad_accum_dtype="fp32", **options, **NVME)
        trained(engine, rows=rows)
        io = engine.snapshot().io
        assert io
        traffic.append((io[0].read.bytes, io[0].written.bytes))
    assert traffic[0] == traffic[1] == traffic[2]
    assert traffic[3][0] > traffic[0][0]


def test_several_forwards_before_their_backwards_and_accumulation(begin: Callable[..., Engine]) -> None:
    results = []
    for options in ({"block_rows": 2}, {}):
        engine = begin(**options, **NVME)
        front = engine.as_optimizer()
        streams = list(inputs(4))
        for pair in (streams[:2], streams[2:]):
            parts = [part for stream in pair for part in (stream.split(2) if not options else [stream])]
            losses = [engine(part) for part in parts]
            for loss in losses:
                loss.backward()
        front.step()
        results.append((dict(engine.master_state_dict()), [stream.grad for stream in streams]))
    assert not same_bits(results[0][0], results[1][0])
    for first, second in zip(results[0][1], results[1][1], strict=True):
        assert first is not None and second is not None and first.equal(second)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_an_empty_micro_batch_adds_nothing(begin: Callable[..., Engine], checkpoints: str) -> None:
    empty = torch.empty(0, SEQUENCE, WIDTH, requires_grad=True)
    results = []
    for streams in ([], [empty]):
        engine = begin(block_rows=2, checkpoints=checkpoints, **NVME)
        update(engine, *streams, *inputs(1), *streams)
        results.append(dict(engine.master_state_dict()))
    assert not same_bits(*results)
    assert empty.grad is not None and empty.grad.shape == empty.shape


def test_steps_in_backward(begin: Callable[..., Engine]) -> None:
    """A group is updated after its last chunk."""
    after = trained(begin(block_rows=2, **NVME))
    engine = begin(block_rows=2, step_in_backward=True, **NVME)
    for stream in inputs():
        engine.backward(engine(stream))
        engine.step()
    assert not same_bits(dict(engine.master_state_dict()), after)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_inputs_of_blocks_are_moved_once(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 1024)
    stays = trained(begin(block_rows=2, **NVME))
    nbytes = ROWS * SEQUENCE * WIDTH * 4
    for checkpoints in CHECKPOINTS:
        engine = begin(
            block_rows=2, checkpoints=checkpoints, activations=place, activation_budget="32KiB", **NVME
        )
        assert not same_bits(trained(engine), stays)
        moved = engine._schedule._moved
        # Three steps: the inputs of three blocks, and that of the loss.
        assert moved is not None and moved.copied_bytes == 3 * 4 * nbytes


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        return functional.dropout(stream * self.weight, 0.5, self.training)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_chunks_draw_the_same_random_numbers_again(start: Start, checkpoints: str) -> None:
    """The gradient of each element is that of the elements which the forward has kept."""
    model = Stack(Dropping, blocks=2)
    model.checkpoints = checkpoints
    engine = start(model, precision="fp32", accumulation=1, clip=0.0, block_rows=2, threshold=0)
    for stream in inputs(2):
        torch.manual_seed(11)
        before = torch.get_rng_state()
        loss = engine(stream)
        after = torch.get_rng_state()
        assert not before.equal(after)
        engine.backward(loss)
        assert after.equal(torch.get_rng_state())
        # The scale of what both blocks have kept: 1 / (1 - p) each.
        scale = 4 * torch.linspace(0.5, 1.5, WIDTH) ** 2
        kept = stream.grad != 0
        assert 0.1 < kept.float().mean() < 0.4
        expected = 2 / 64 * scale**2 * stream.detach() * kept
        torch.testing.assert_close(stream.grad, expected)
        assert float(loss.detach()) == pytest.approx(
            float((scale * stream * kept).detach().square().sum()) / 64
        )
        engine.zero_grad()


def test_a_frozen_block_passes_gradients_on(start: Start) -> None:
    gradients = []
    for options in ({}, {"block_rows": 2}):
        torch.manual_seed(3)
        model = Stack()
        model.blocks[1].requires_grad_(False)
        engine = start(model, precision="fp32", accumulation=1, clip=0.0, **options, **NVME)
        (stream,) = inputs(1)
        engine.backward(engine(stream))
        gradients.append([stream.grad, engine.get_fp32_gradient("blocks.0.up.weight")])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_a_graph_that_is_kept_goes_backward_again(begin: Callable[..., Engine]) -> None:
    gradients = []
    for times in (1, 2):
        engine = begin(block_rows=2, **NVME)
        engine.as_optimizer()
        (stream,) = inputs(1)
        loss = engine(stream)
        for time in range(times):
            loss.backward(retain_graph=time + 1 < times)
        gradients.append(engine.get_fp32_gradient("blocks.0.up.weight"))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def test_autocast(begin: Callable[..., Engine]) -> None:
    """The copies of weights that autocast keeps carry gradients, also when the backward runs inside of it."""
    gradients = []
    for options in ({}, {"block_rows": 2}):
        engine = begin(**options)
        (stream,) = inputs(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(stream)
            before = engine.module.blocks[0].up(stream.detach())
            engine.backward(loss)
            after = engine.module.blocks[0].up(stream.detach())
        assert before.requires_grad and after.requires_grad
        gradients.append(engine.get_fp32_gradient("blocks.0.up.weight"))
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


def test_copies_and_the_model_after_release_have_their_own_forward(begin: Callable[..., Engine]) -> None:
    engine = begin(block_rows=2)
    model = engine.module
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        block = other.blocks[0]
        assert isinstance(block.forward, MethodType) and block.forward.__self__ is block
    engine.release()
    assert all("forward" not in block.__dict__ for block in model.blocks)


class Positioned(nn.Module):
    """Returns a matrix that all rows share, which the first block makes, as T5's bias of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.positions = nn.Linear(WIDTH, WIDTH), nn.Linear(SEQUENCE, SEQUENCE)

    def forward(self, stream: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.positions(torch.eye(SEQUENCE, dtype=stream.dtype))[None]
        return stream + (bias @ self.up(stream)).tanh(), bias


def test_an_output_that_all_rows_share_gets_its_gradient_once(start: Start) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Positioned() for _ in range(3))

        def forward(self, stream: Tensor) -> Tensor:
            bias = None
            for block in self.blocks:
                stream, bias = block(stream, bias)
            return stream.square().sum() / 64

    gradients = []
    for options in ({}, {"block_rows": 2}):
        torch.manual_seed(3)
        engine = start(Positions(), precision="fp32", accumulation=1, clip=0.0, **options, **NVME)
        engine.backward(engine(next(inputs(1))))
        gradients.append(engine.get_fp32_gradient("blocks.0.positions.weight"))
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_an_output_without_a_graph_has_none_in_chunks(start: Start) -> None:
    class Measuring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
            return self.up(stream), stream.detach().abs()

    class Measured(Stack):
        def forward(self, stream: Tensor, *args: Any) -> Tensor:
            for block in self.blocks:
                stream, size = block(stream)
                outputs.append((stream.requires_grad, size.requires_grad))
            return stream.square().sum()

    outputs: list[tuple[bool, bool]] = []
    engine = start(Measured(Measuring), precision="fp32", accumulation=1, block_rows=2)
    engine.backward(engine(next(inputs(1))))
    assert outputs == 3 * [(True, False)]


def test_without_a_backward_all_is_computed(begin: Callable[..., Engine]) -> None:
    """In chunks where that is possible, else all rows at once."""
    (stream,) = inputs(1)
    for make in (None, Joint, lambda: Balancing(keeps=True)):
        plain, engine = begin(make).eval(), begin(make, block_rows=2).eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(stream), plain(stream))
    engine = begin(block_rows=2).eval()
    with torch.no_grad():
        engine(stream)
        Counted.rows.clear()
        engine(stream)
        assert Counted.rows == 3 * [2, 2, 1]
        # What a hook records must have all rows.
        recorded: list[Tensor] = []
        hook = engine.module.blocks[0].up.register_forward_hook(
            lambda module, args, output: recorded.append(output)
        )
        engine(stream)
        assert [len(output) for output in recorded] == [5]
        hook.remove()


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_hooks_inside_of_blocks_change_no_chunk_of_training(
    begin: Callable[..., Engine], checkpoints: str
) -> None:
    """The first forward of a reentrant checkpoint has no gradients, and must draw its numbers as the second one."""
    engine = begin(block_rows=2, checkpoints=checkpoints)
    for block in engine.module.blocks:
        block.up.register_forward_hook(lambda module, args, output: None)
    update(engine, next(inputs(1)))
    Counted.rows.clear()
    update(engine, next(inputs(1)))
    assert max(Counted.rows) == 2


def test_copies_of_the_parameters_get_their_gradients(begin: Callable[..., Engine]) -> None:
    """Of a functional call, which the recomputation of a chunk would not repeat: all rows are computed at once."""
    engine = begin(block_rows=2, **NVME)
    (stream,) = inputs(1)
    copies = {name: value.clone().requires_grad_() for name, value in engine.state_dict().items()}
    torch.func.functional_call(engine.module, copies, (stream,)).backward()
    assert engine.get_fp32_gradient("blocks.0.up.weight") is None
    update(engine, stream)
    assert copies["blocks.0.up.weight"].grad is not None
    engine = begin(block_rows=2)
    engine.backward(engine(stream))
    gradient = engine.get_fp32_gradient("blocks.0.up.weight")
    torch.testing.assert_close(copies["blocks.0.up.weight"].grad, gradient, rtol=1e-5, atol=1e-6)


def test_the_model_of_the_suite(start: Start, micro_batches: Callable[..., Any]) -> None:
    """With a tied embedding and a mean over all rows: within rounding of the run without chunks."""
    masters = []
    for options in ({}, {"block_rows": 1}):
        torch.manual_seed(3)
        engine = start(SmallModel(), precision="fp32", accumulation=2, **NVME, **options)
        for batch in micro_batches(4):
            engine.backward(engine(*batch))
            engine.step()
        masters.append(engine.master_state_dict())
    for name, value in masters[0].items():
        torch.testing.assert_close(masters[1][name], value, rtol=1e-5, atol=1e-6)
