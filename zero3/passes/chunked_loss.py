"""The cross entropy of a head's logits in chunks of rows: the logits of all rows never exist at once.

Forward computes the loss chunk by chunk and keeps no logits. Backward computes the logits of each chunk once more, with
the random state and the autocast of forward, and goes through them. Both run within one call of the head's owner, so
the engine fetches the head once for all chunks, whatever their number, on every rank.

Note [One gradient of the head]
    All chunks are one node of autograd. The gradient of each parameter is summed up inside of the node, in fp32, and
    leaves it once: a node for each chunk would make autograd add up gradients of 16 bits, and the engine accumulate the
    gradient of a tied head as often as there are chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiering.errors import ConfigError, EngineStateError
from zero3.params import inner_tensors, resharded
from zero3.params.resharded import Result
from zero3.passes.graph import nodes_behind
from zero3.passes.random_state import RandomState


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    rows: int = 1024,
    shift: bool = False,
    transform: Callable[[Tensor], Tensor] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The cross entropy of ``head(hidden)`` with ``labels``, of which ``rows`` rows of logits exist at a time.

    ``hidden`` has the shape (..., width) and ``labels`` the shape (...) with the indices of classes. ``head`` maps rows
    to logits, each row by itself; ``transform`` is applied to the logits, for example a cap. With ``shift``, the last
    dimension of ``labels`` is time, and each position predicts the label of the next one, as in a causal language
    model. ``ignore_index``, ``label_smoothing`` and ``reduction`` are those of torch's ``cross_entropy``. Returns a
    scalar in fp32, or in float64 if the logits have it.

    The loss and the gradient of ``hidden`` have the bits of this loop, and so has the gradient of a head in fp32:

        total = sum(cross_entropy(head(part).float(), part_labels, reduction="sum") for each ``rows`` rows)
        loss = total / (labels != ignore_index).sum()

    The gradients of a head in 16 bits are summed over the chunks in fp32, from the last chunk to the first, and rounded
    once. Other ``rows`` may change the rounding: torch chooses the kernels of a product by its shape.

    Memory beyond ``hidden`` and the head: the logits of ``rows`` rows, three times in fp32; in backward a gradient of
    ``hidden``, and of each trained parameter of the head a gradient in its dtype and the sum in fp32.

    Raises ConfigError for arguments that do not fit, and in backward if the logits depend on another tensor that
    requires a gradient; EngineStateError in a backward with ``create_graph=True``.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"chunked_cross_entropy needs a label for each row: hidden of shape {tuple(hidden.shape)} has rows of shape"
            f" {tuple(hidden.shape[:-1])}, but labels have the shape {tuple(labels.shape)}"
        )
    if not isinstance(rows, int) or rows < 1 or reduction not in ("mean", "sum"):
        raise ConfigError(
            "chunked_cross_entropy needs a whole number of rows, at least 1, and a reduction of 'mean' or 'sum', not"
            f" {rows!r} and {reduction!r}"
        )
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"chunked_cross_entropy needs the module of the head, whose call fetches its parameters, not a"
            f" {type(head).__name__}; pass what changes the logits as transform"
        )
    if shift:
        labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    parts = [part for param in head.parameters() for part in inner_tensors.parts_of(param)]
    chunks = _Chunks(
        _Loss(head, transform, ignore_index, label_smoothing),
        rows,
        parts,
        {
            "device_type": hidden.device.type,
            "enabled": torch.is_autocast_enabled(hidden.device.type),
            "dtype": torch.get_autocast_dtype(hidden.device.type),
            # Without gradients, a cast of the head that the cache keeps would lose them for its next use.
            "cache_enabled": False,
        },
    )
    trained = [param for param in head.parameters() if param.requires_grad]

    def apply() -> Tensor:
        total: Tensor = _ChunkedLoss.apply(chunks, hidden, labels, *trained)  # type: ignore[no-untyped-call]
        return total

    total = chunks.while_head_is_here(apply)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


@dataclass(frozen=True)
class _Loss:
    """The sum of the losses of rows."""

    head: nn.Module
    transform: Callable[[Tensor], Tensor] | None
    ignore_index: int
    label_smoothing: float

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.transform is not None:
            logits = self.transform(logits)
        return functional.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            labels,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )


@dataclass(frozen=True)
class _Chunks:
    """How the loss is computed: by chunks of ``rows``, under ``autocast``. ``parts`` are the parameters of the head."""

    loss: _Loss
    rows: int
    parts: list[nn.Parameter]
    autocast: dict[str, Any]

    def of(self, count: int) -> Iterator[slice]:
        return (slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows))

    def while_head_is_here(self, function: Callable[[], Result]) -> Result:
        """Call ``function``, which calls the head once for each chunk."""
        owner = next(filter(None, map(resharded.owner_of, self.parts)), None)
        if owner is None:
            return function()
        return owner.call_with([part for part in self.parts if resharded.owner_of(part) is owner], function)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses of all rows. See Note [One gradient of the head]."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, hidden: Tensor, labels: Tensor, *trained: nn.Parameter) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        # Not saved by autograd: their values are read through the head, which fetches them.
        ctx.trained, ctx.chunks = trained, chunks
        ctx.random_states = []
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(**chunks.autocast):
            for chunk in chunks.of(len(hidden)):
                ctx.random_states.append(RandomState.now([hidden]))
                total = total + chunks.loss(hidden[chunk], labels[chunk])
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise EngineStateError(
                "gradients of gradients (create_graph=True) are not supported for chunked_cross_entropy; use"
                " cross_entropy of all logits"
            )
        chunks: _Chunks = ctx.chunks
        hidden, labels = ctx.saved_tensors
        needed = [param for param, need in zip(ctx.trained, ctx.needs_input_grad[3:], strict=True) if need]
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        sums: dict[nn.Parameter, Tensor] = {}

        def through(chunk: slice, random_state: RandomState) -> None:
            part = hidden[chunk].detach().requires_grad_(of_hidden is not None)
            random_state.restore()
            with torch.enable_grad(), torch.autocast(**chunks.autocast):
                loss = chunks.loss(part, labels[chunk])
            inputs = [*needed] if of_hidden is None else [part, *needed]
            _check_leaves(loss, inputs)
            gradients = list(torch.autograd.grad(loss, inputs, gradient.to(loss.dtype), allow_unused=True))
            if of_hidden is not None:
                of_part = gradients.pop(0)
                of_hidden[chunk] = 0 if of_part is None else of_part
            for param, addend in zip(needed, gradients, strict=True):
                if addend is not None and param in sums:
                    sums[param] += addend
                elif addend is not None:
                    # A copy: autograd may have expanded the gradient.
                    sums[param] = addend.to(torch.promote_types(addend.dtype, torch.float32), copy=True)

        def through_all() -> None:
            # The last chunk first, as autograd goes through a loop.
            for chunk, state in reversed(list(zip(chunks.of(len(hidden)), ctx.random_states, strict=True))):
                through(chunk, state)

        present = RandomState.now([hidden])
        try:
            chunks.while_head_is_here(through_all)
        finally:
            present.restore()
        return None, of_hidden, None, *(sums[p].to(p.dtype) if p in sums else None for p in ctx.trained)


def _check_leaves(loss: Tensor, inputs: Collection[Tensor]) -> None:
    """ConfigError if a tensor besides ``inputs`` requires a gradient of the loss: it would get none."""
    known = set(map(id, inputs))
    for node in nodes_behind([loss]):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ConfigError(
                f"chunked_cross_entropy: the logits depend on a tensor of shape {tuple(leaf.shape)} that requires a"
                " gradient, and is neither hidden nor a parameter of the head: it would get no gradient. Pass a module"
                " as head that has it as a parameter and uses it in forward, instead of transform"
            )
