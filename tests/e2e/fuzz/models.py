"""Small random models, with what makes placement hard: each is built of a plan, so that a failure can be shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiering

from .bodies import BODIES, IN_CHUNKS, INNER

SEQUENCE = 5
CHECKPOINTING = (None, None, "reentrant", "not reentrant")


class PlannedError(Exception):
    """A fault that an action has planted."""


@dataclass(frozen=True)
class BlockPlan:
    """One block: its body's kind, and how it is called."""

    kind: str
    checkpointing: str | None = None
    dropout: float = 0.0
    frozen: bool = False
    shows_weight: bool = False
    inner: tuple[BlockPlan, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random, kinds: tuple[str, ...]) -> BlockPlan:
        kind = rng.choice(kinds)
        return cls(
            kind,
            checkpointing=rng.choice(CHECKPOINTING),
            dropout=rng.choice((0.0, 0.0, 0.1)),
            frozen=rng.random() < 0.1,
            shows_weight=rng.random() < 0.1,
            inner=tuple(cls.draw(rng, INNER) for _ in range(2)) if kind == "nested" else (),
        )

    @property
    def reentrant(self) -> bool:
        return self.checkpointing == "reentrant" or any(plan.reentrant for plan in self.inner)

    def __str__(self) -> str:
        words = [self.kind]
        words += [f"{self.checkpointing} checkpoint"] if self.checkpointing else []
        words += [f"dropout {self.dropout}"] if self.dropout else []
        words += [word for word in ("frozen", "shows_weight") if getattr(self, word)]
        words += [str(plan) for plan in self.inner]
        return f"({', '.join(words)})"


@dataclass(frozen=True)
class ModelPlan:
    """What a model is built of."""

    width: int
    vocabulary: int
    blocks: tuple[BlockPlan, ...]
    encoder_layers: int = 0
    outer_checkpointing: str | None = None
    tied: bool = False
    first_block_again: bool = False  # called a second time, after the others
    last_block_shared: bool = False  # the last entry is the first block's module
    reads_embedding: bool = False  # as the weights of the head, without calling the module
    reads_block: bool = False  # a penalty on a block's weight, which the model reads
    encoder_reads: bool = False  # a hook of the encoder reads a weight of its first layer
    frozen: tuple[str, ...] = ()  # beginnings of names
    loss_rows: int = 0  # of a chunk in which head and loss are computed; 0: all at once

    @classmethod
    def draw(cls, rng: random.Random) -> ModelPlan:
        count = rng.randint(1, 4)
        encoder = rng.random() < 0.12
        return cls(
            width=rng.choice((16, 24, 32)),
            vocabulary=rng.choice((40, 150)),
            blocks=tuple(BlockPlan.draw(rng, tuple(BODIES)) for _ in range(count)),
            encoder_layers=2 if encoder else 0,
            outer_checkpointing=rng.choice(CHECKPOINTING) if rng.random() < 0.3 else None,
            tied=rng.random() < 0.4,
            first_block_again=rng.random() < 0.15,
            last_block_shared=count > 2 and rng.random() < 0.2,
            reads_embedding=rng.random() < 0.2,
            reads_block=rng.random() < 0.15,
            encoder_reads=encoder and rng.random() < 0.5,
            frozen=tuple(name for name in ("embedding", "norm", "position") if rng.random() < 0.08),
            loss_rows=rng.choice((0, 0, 0, 5)),
        )

    @property
    def reentrant(self) -> bool:
        """Whether a checkpoint is one through which torch gives no gradient to autograd.grad."""
        return self.outer_checkpointing == "reentrant" or any(plan.reentrant for plan in self.blocks)

    @property
    def runs_in_chunks(self) -> bool:
        """Whether blocks may run over chunks of rows: each row alone, and nothing is kept beside the output."""
        kinds = {plan.kind for block in self.blocks for plan in (block, *block.inner)}
        return (
            len(self.blocks) > 1
            and kinds <= {*IN_CHUNKS, "nested"}
            and not any(plan.shows_weight for block in self.blocks for plan in (block, *block.inner))
        )

    @property
    def draws_random_numbers(self) -> bool:
        return any(plan.dropout for block in self.blocks for plan in (block, *block.inner))

    @property
    def reads_elsewhere(self) -> bool:
        return self.reads_block or self.reads_embedding or any(plan.shows_weight for plan in self.blocks)

    def smaller(self) -> Iterator[ModelPlan]:
        """Plans with one thing less."""
        for index, block in enumerate(self.blocks):
            if len(self.blocks) > 1:
                yield replace(self, blocks=self.blocks[:index] + self.blocks[index + 1 :])
            for plain in (
                {"checkpointing": None},
                {"dropout": 0.0},
                {"frozen": False},
                {"shows_weight": False},
            ):
                simpler = replace(block, **plain)
                if simpler != block:
                    yield replace(self, blocks=(*self.blocks[:index], simpler, *self.blocks[index + 1 :]))
        for name in ("outer_checkpointing", "tied", "first_block_again", "last_block_shared", "reads_embedding",
                     "reads_block", "encoder_reads", "encoder_layers", "frozen", "loss_rows"):  # fmt: skip
            if getattr(self, name):
                yield replace(
                    self, **{name: type(getattr(self, name))() if name != "outer_checkpointing" else None}
                )

    def __str__(self) -> str:
        flags = [
            f"{name} {value}"
            for name, value in vars(self).items()
            if value and name not in ("blocks", "width", "vocabulary")
        ]
        return f"width {self.width}, blocks {' '.join(map(str, self.blocks))} {', '.join(flags)}"


@dataclass
class Ways:
    """How the model is called, which a training loop may change at any time."""

    skipped: frozenset[int] = frozenset()
    order: tuple[int, ...] | None = None
    clamped: bool = False  # the forward limits a weight of each block in place


class _Tripwire(torch.autograd.Function):
    """The identity, whose backward raises if its block is to fail there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.block.failing == "backward":
            raise PlannedError("in backward")
        return gradient, None


class Block(nn.Module):
    """A residual block around a body."""

    def __init__(self, plan: BlockPlan, width: int) -> None:
        super().__init__()
        self.plan = plan
        self.body: nn.Module = (
            Nested([Block(inner, width) for inner in plan.inner], width)
            if plan.kind == "nested"
            else BODIES[plan.kind](width)
        )
        self.failing = ""  # "forward", "backward" or "recomputation"
        if plan.frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        y = checkpointed(self.run, x, self.plan.checkpointing)
        return (y, next(self.parameters()).view(-1)) if self.plan.shows_weight else y

    def run(self, x: Tensor) -> Tensor:
        self._fail_as_planned()
        y = functional.dropout(self.body(x), self.plan.dropout, self.training)
        y = _Tripwire.apply(y, self)
        return x + 0.5 * torch.tanh(y)

    def _fail_as_planned(self) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if self.failing == "forward" or (self.failing == "recomputation" and recomputing):
            raise PlannedError(f"in {self.failing}")


class Nested(nn.Module):
    """Blocks inside a block, and a parameter beside them."""

    def __init__(self, blocks: list[Block], width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = _of_block(block, x)
        return x * self.scale


def _of_block(block: nn.Module, x: Tensor) -> Tensor:
    """What a block makes of ``x``; a weight that it shows takes part."""
    result = block(x)
    if not isinstance(result, tuple):
        shown: Tensor = result
        return shown
    y, weight = result
    combined: Tensor = y + 0.01 * weight[: y.shape[-1]].mean()
    return combined


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor, how: str | None) -> Tensor:
    if how is None or not torch.is_grad_enabled() or not x.requires_grad:
        return function(x)
    result: Tensor = checkpoint(function, x, use_reentrant=how == "reentrant")
    return result


class Model(nn.Module):
    """A language model of a plan. ``forward`` returns the loss, or without targets the logits."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        self.plan = plan
        self.ways = Ways()
        width = plan.width
        self.embedding = nn.Embedding(plan.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.position = nn.Parameter(torch.randn(32, width) * 0.1)
        if plan.encoder_layers:
            self.encoder = _encoder(plan)
        self.blocks = nn.ModuleList(Block(block, width) for block in plan.blocks)
        if plan.last_block_shared and len(self.blocks) > 2:
            self.blocks[-1] = self.blocks[0]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, plan.vocabulary, bias=False)
        if plan.tied:
            self.head.weight = self.embedding.weight
        for name, param in self.named_parameters():
            if name.startswith(plan.frozen):
                param.requires_grad_(False)
        # Whatever else is frozen, there is something to train.
        self.output_weights[0].requires_grad_(True)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        self.forget_balances()  # of blocks that are skipped now
        if self.ways.clamped:
            self._clamp()
        x = self.embedding(tokens) + self.position[: tokens.shape[-1]]
        if offset is not None:
            x = x + offset.to(x.dtype)
        if self.plan.encoder_layers:
            x = self.encoder(x)
        x = self.norm(checkpointed(self.through_blocks, x, self.plan.outer_checkpointing))
        reads = self.plan.reads_embedding
        if targets is not None and self.plan.loss_rows and not reads:
            return (
                tiering.chunked_cross_entropy(x, self.head, targets, rows=self.plan.loss_rows)
                + self._penalty()
            )
        logits: Tensor = (functional.linear(x, self.embedding.weight) if reads else self.head(x)).float()
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self._penalty()

    @property
    def output_weights(self) -> tuple[nn.Parameter, ...]:
        """What the logits are made by: a weight, or its tiles."""
        return tuple((self.embedding if self.plan.reads_embedding else self.head).parameters())

    def through_blocks(self, x: Tensor) -> Tensor:
        for index in self.ways.order or range(len(self.blocks)):
            if index not in self.ways.skipped:
                x = _of_block(self.blocks[index], x)
        return _of_block(self.blocks[0], x) if self.plan.first_block_again else x

    def _penalty(self) -> Tensor | float:
        penalty: Tensor | float = 0.0
        for module in self.modules():
            balance = getattr(module, "balance", None)
            if isinstance(balance, Tensor):
                penalty = penalty + 0.1 * balance
        if self.plan.reads_block:
            penalty = penalty + 0.01 * next(self.blocks[-1].parameters()).float().square().mean()
        return penalty

    def forget_balances(self) -> None:
        """Let go of the parts of graphs that modules keep: nobody can copy them."""
        for module in self.modules():
            if hasattr(module, "balance"):
                module.balance = None

    def _clamp(self) -> None:
        with torch.no_grad():
            for block in self.blocks:
                next(block.parameters()).clamp_(-0.15, 0.15)


def _encoder(plan: ModelPlan) -> nn.Module:
    layer = nn.TransformerEncoderLayer(plan.width, 2, 2 * plan.width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, plan.encoder_layers, enable_nested_tensor=False)
    if plan.encoder_reads:
        encoder.register_forward_pre_hook(_scale_by_weight)
    return encoder


def _scale_by_weight(encoder: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    weight = encoder.get_submodule("layers.0").linear1.weight
    return (args[0] * (1 + weight.float().mean()).to(args[0].dtype),)
