"""Blocks that cannot run over chunks of rows, and calls of them, are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.conftest import Block
from tests.zero3.passes.row_stacks import (
    ROWS,
    SEQUENCE,
    WIDTH,
    Balancing,
    Joint,
    Stack,
    Start,
    begin,
    inputs,
    update,
)
from tiering.errors import ConfigError, EngineStateError
from zero3.engine.engine import Engine

__all__ = ["begin"]


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(SEQUENCE)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.norm(self.up(stream))
        return result


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


class Prepared(nn.Module):
    """Reads a tensor that a hook computes before its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale: Tensor
        self.register_forward_pre_hook(lambda block, args: setattr(block, "scale", block.up.bias.exp()))

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.up(stream) * self.scale
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
    (
        Prepared,
        r"block 'blocks\.0' reads a tensor that was computed before it and is no argument .*\(ExpBackward0\)",
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


def test_an_argument_that_is_found_to_have_no_rows_adds_to_those_found_before(
    begin: Callable[..., Engine],
) -> None:
    class Scaled(Biased):
        def forward(self, stream: Tensor, bias: Tensor, options: Any = None) -> Tensor:
            return super().forward(stream, bias) * options.mean()

    plain, engine = begin(Scaled), begin(Scaled, block_rows=3)
    (stream,) = inputs(1, SEQUENCE)
    bias, scale = torch.randn(2, SEQUENCE, SEQUENCE, generator=torch.Generator().manual_seed(1))
    # Both have as many rows as the stream by chance; of the first one that is known from the first call.
    for others in ((bias, scale[:1]), (bias, scale)):
        torch.testing.assert_close(*(each(stream, *others) for each in (plain, engine)))


def test_a_cache_is_dropped_as_transformers_drops_it_under_checkpointing(
    begin: Callable[..., Engine],
) -> None:
    class GradientCheckpointingLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, stream: Tensor, past_key_values: Any = None) -> Tensor:
            caches.append(past_key_values)
            result: Tensor = stream + self.up(stream)
            return result

    caches: list[Any] = []
    engine = begin(GradientCheckpointingLayer, block_rows=2)
    engine(*inputs(1), object()).backward()
    assert len(caches) > 3 and not any(caches)


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
