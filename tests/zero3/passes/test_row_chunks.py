"""Blocks over chunks of rows: the gradients of micro-batches to the bit, once the parameters, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zero3.conftest import Block, SmallModel, same_bits
from tiering.errors import ConfigError, EngineStateError
from zero3.engine.engine import Engine
from zero3.passes import moved_activations

WIDTH, SEQUENCE, ROWS = 16, 8, 5
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
CHECKPOINTS = ("no", "not reentrant", "reentrant")
Start = Callable[..., Engine]


class Counted(Block):
    """Notes the rows of each call of its forward."""

    rows: ClassVar[list[int]] = []

    def forward(self, stream: Tensor) -> Tensor:
        Counted.rows.append(len(stream))
        return super().forward(stream)


class Stack(nn.Module):
    """Blocks, and a loss that is a sum over rows. Outside of the blocks, no operation joins rows."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: Counted(WIDTH), blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.checkpoints = "no"

    def forward(self, stream: Tensor, *args: Any) -> Tensor:
        for block in self.blocks:
            if self.checkpoints == "no":
                stream = block(stream, *args)
            else:
                stream = checkpoint(block, stream, *args, use_reentrant=self.checkpoints == "reentrant")
        return stream.float().square().sum() / 64


@pytest.fixture
def begin(start: Start) -> Callable[..., Engine]:
    """``begin(make, block_rows=...)`` makes an engine of a stack of blocks with the same first values."""

    def initialize(
        make: Callable[[], nn.Module] | None = None, *, checkpoints: str = "no", **options: Any
    ) -> Engine:
        torch.manual_seed(3)
        model = Stack() if make is None else Stack(make)
        model.checkpoints = checkpoints
        options = {"precision": "fp32", "accumulation": 1, "clip": 0.0} | options
        return start(model, **options)

    return initialize


def inputs(count: int = 3, rows: int = ROWS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(rows, SEQUENCE, WIDTH, generator=generator).requires_grad_()


def as_dtype(engine: Engine, stream: Tensor) -> Tensor:
    return stream.to(torch.bfloat16) if engine.settings.precision == "bf16" else stream


def update(engine: Engine, *chunks: Tensor) -> None:
    """One update, with a backward for each of ``chunks``."""
    front = engine.as_optimizer()
    for chunk in chunks:
        engine(as_dtype(engine, chunk)).backward()
    front.step()


def trained(engine: Engine, *, rows: int | None = None) -> dict[str, Tensor]:
    """The masters after three updates; with ``rows``, micro-batches have so many rows."""
    for stream in inputs():
        update(engine, *(stream.split(rows) if rows else [stream]))
    return dict(engine.master_state_dict())


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


class Joint(nn.Module):
    """Attends to all rows: the rows of its input are not those of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        mixed: Tensor = stream + self.up(stream).softmax(dim=0)
        return mixed


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(SEQUENCE)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.norm(self.up(stream))
        return result


class Balancing(nn.Module):
    """Returns an auxiliary loss, or keeps it."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.keeps = keeps
        self.balance: Tensor | None = None

    def forward(self, stream: Tensor) -> Any:
        stream = self.up(stream)
        if self.keeps:
            self.balance = stream.square().mean()
            return stream
        return stream, stream.square().mean()


class Editing(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        hidden = self.up(stream)
        stream += 1
        return stream + hidden


class Biased(nn.Module):
    """Adds a matrix of its argument to each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor, bias: Tensor, options: Any = None) -> Tensor:
        result: Tensor = stream + (bias @ self.up(stream)).tanh()
        return result


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (
        Joint,
        r"block 'blocks\.0' cannot run over chunks of 2 of its 5 rows: its output differs by .*mixes rows",
    ),
    (Normalising, r"block 'blocks\.0' mixes rows: 'norm' \(BatchNorm1d\) computes statistics"),
    (Editing, r"block 'blocks\.0' changes an argument in place"),
    (lambda: Balancing(keeps=False), r"returns a tensor of shape \(\) for 2 rows \(output\[1\]\)"),
    (
        lambda: Balancing(keeps=True),
        r"a tensor that block 'blocks\.0' computes is kept outside of its output",
    ),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_blocks_that_chunks_would_change_are_refused(
    begin: Callable[..., Engine], make: Callable[[], nn.Module], reason: str
) -> None:
    engine = begin(make, block_rows=2)
    for stream in inputs(2):
        with pytest.raises(ConfigError, match=reason):
            engine(stream)


def test_a_block_that_was_evaluated_is_checked_again_before_it_trains(begin: Callable[..., Engine]) -> None:
    engine = begin(Normalising, block_rows=2).eval()
    with torch.no_grad():
        engine(next(inputs(1)))
    engine.train()
    with pytest.raises(ConfigError, match=r"block 'blocks\.0' mixes rows: 'norm'"):
        engine(next(inputs(1)))


def test_arguments(begin: Callable[..., Engine]) -> None:
    """Of as many elements as there are rows, an argument that has no rows is found by its results."""
    plain, engine = begin(Biased), begin(Biased, block_rows=3)
    for rows in (5, SEQUENCE):
        (stream,) = inputs(1, rows)
        matrix = torch.randn(SEQUENCE, SEQUENCE, generator=torch.Generator().manual_seed(1))
        for bias in (matrix, matrix[None], matrix.expand(rows, SEQUENCE, SEQUENCE)):
            losses = [each(stream, bias) for each in (plain, engine)]
            torch.testing.assert_close(*losses)
            for each, loss in zip((plain, engine), losses, strict=True):
                each.backward(loss)
    names = ["blocks.0.up.weight", "blocks.2.up.weight"]
    for name in names:
        torch.testing.assert_close(*(each.get_fp32_gradient(name) for each in (plain, engine)))


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


def test_arguments_that_cannot_be_divided_are_named(begin: Callable[..., Engine]) -> None:
    engine = begin(Biased, block_rows=2)
    (stream,) = inputs(1)
    bias = torch.eye(SEQUENCE)
    with pytest.raises(ConfigError, match=r"argument 'options' of block 'blocks\.0' is a object"):
        engine(stream, bias, object())
    with pytest.raises(ConfigError, match=r"argument 'options' of block 'blocks\.0' is a list"):
        engine(stream, bias, [1, 2, 3, 4, 5])
    wrong = torch.ones(SEQUENCE, 1, SEQUENCE).expand(-1, SEQUENCE, -1)[:ROWS, :, None]
    with pytest.raises(ConfigError, match=r"Divided were stream \(5, 8, 16\), bias \(5, 8, 1, 8\)"):
        engine(stream, wrong)


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


def test_calls_of_autograd_that_give_no_gradients_to_parameters_are_refused(
    begin: Callable[..., Engine],
) -> None:
    engine = begin(block_rows=2)
    (stream,) = inputs(1)
    with pytest.raises(EngineStateError, match=r"torch\.autograd\.grad.* use backward\(\)"):
        torch.autograd.grad(engine(stream), stream)
    with pytest.raises(EngineStateError, match="create_graph"):
        engine(stream).backward(create_graph=True)
    update(engine, stream)


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


def test_a_model_without_blocks_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="the model has no blocks"):
        start(Block(WIDTH), block_rows=2)


def test_blocks_that_are_not_called_are_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    class Bypassing(Stack):
        def forward(self, stream: Tensor, *args: Any) -> Tensor:
            for block in self.blocks:
                stream = block.down(block.up(stream))
            return stream.sum()

    engine = start(Bypassing(), precision="fp32", block_rows=2)
    engine(next(inputs(1)))
    assert "block_rows has no effect" in caplog.text


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
