"""The check that a block may run over chunks of rows: made once for each way in which it is called.

The outputs for the first rows, computed together, must be those of two chunks up to rounding. An argument that was
divided by mistake, because its first dimension is by chance the number of rows, changes shapes or values; and so does
one that holds rows and was passed whole. Of a block that draws random numbers, the outputs in evaluation are compared.

Under chunks a block's forward is computed without gradients. So a tensor that the block keeps elsewhere (an auxiliary
loss on the module, attention weights that a hook has recorded) would lose its gradient. One chunk is computed with
gradients to find these: its graph must be gone with its outputs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tiering.errors import ConfigError, TieringError
from zero3.passes.graph import nodes_behind
from zero3.passes.pass_state import next_node
from zero3.passes.random_state import RandomState
from zero3.passes.row_arguments import Call, Joined

STATISTICS = (nn.modules.batchnorm._BatchNorm,)
"""Modules that compute over the rows of a batch while they train."""
DIFFERENCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""The largest relative difference of outputs by rounding; see DIFFERENCE_IN_FP32 for other dtypes."""
DIFFERENCE_IN_FP32 = 2e-3

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Findings:
    """What the check of a call has found about the block and the tensors of its output, by their order.

    ``differentiable``: whether each has a graph. ``common``: those that are not made of rows, for example a bias of
    positions, which the first block computes for all.
    """

    draws_random_numbers: bool
    differentiable: tuple[bool, ...]
    common: frozenset[int] = frozenset()


class RowCheck:
    """Checks calls of ``block``, whose name is ``name``, that runs over chunks of ``rows`` rows.

    ``forward`` computes a chunk.
    """

    def __init__(self, name: str, block: nn.Module, forward: Forward, rows: int) -> None:
        self._name = name
        self._block = block
        self._forward = forward
        self._rows = rows
        self._passed: dict[tuple[object, ...], Findings] = {}
        self._refused: dict[tuple[object, ...], str] = {}
        # Positions of tensors that were seen without rows, by the numbers of dimensions of all tensors.
        self._whole: dict[tuple[int, ...], frozenset[int]] = {}

    def divide(self, call: Call) -> tuple[Call, Findings]:
        """``call`` as it is divided. ConfigError if the block cannot run over chunks of it."""
        whole = self._whole.get(call.dims, frozenset())
        if whole & call.divided:
            # By chance, it has as many elements as there are rows now.
            call = call.passing_whole(whole)
        key = self._key(call)
        if key in self._refused:
            raise ConfigError(self._refused[key])
        if key not in self._passed:
            try:
                self._refuse_statistics()
                call, findings = self._checked(call)
            except ConfigError as error:
                self._refused[key] = error.message
                raise
            key = self._key(call)
            self._passed[key] = findings
            self._note_whole(call, call.without_rows)
        return call, self._passed[key]

    def _note_whole(self, call: Call, positions: frozenset[int]) -> None:
        self._whole[call.dims] = self._whole.get(call.dims, frozenset()) | positions

    def _key(self, call: Call) -> tuple[object, ...]:
        # Transformers adds hooks that record outputs when a call asks for them for the first time.
        hooks = sum(len(module._forward_hooks) for module in self._block.modules())
        trained = sum(param.requires_grad for param in self._block.parameters())
        return call.signature, call.rows > self._rows, self._block.training, hooks, trained

    def _refuse_statistics(self) -> None:
        for name, module in self._block.named_modules():
            if isinstance(module, STATISTICS) and module.training:
                raise ConfigError(
                    f"block_rows: block {self._name!r} mixes rows: {name!r} ({type(module).__name__}) computes"
                    " statistics over all rows of a batch. Put it in evaluation mode, replace it by GroupNorm or"
                    " LayerNorm, or remove block_rows"
                )

    def _checked(self, call: Call) -> tuple[Call, Findings]:
        result = self._try(call)
        if isinstance(result, Findings):
            return call, result
        # An argument beside the first one may have as many elements as there are rows by chance.
        for position in sorted(call.divided)[1:]:
            whole = frozenset({position})
            other = call.passing_whole(whole)
            findings = self._try(other)
            if isinstance(findings, Findings):
                self._note_whole(other, whole)
                return other, findings
        divided, rest = (call.describe(self._block.forward, divided=each) for each in (True, False))
        raise ConfigError(
            f"block_rows: block {self._name!r} cannot run over chunks of {self._rows} of its {call.rows} rows:"
            f" {result}. Divided were {divided}; passed whole: {rest or 'no tensor'}. Give each argument"
            " that has rows the first dimension of the first one, or remove block_rows and use more micro-batches"
        )

    def _try(self, call: Call) -> Findings | str:
        """What the check finds, or what forbids chunks."""
        with _undisturbed(self._block, call.tensors):
            try:
                return self._run(call)
            except (TieringError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
                if call.rows <= self._rows:
                    raise
                return f"it fails for a part of them ({type(error).__name__}: {error})"

    def _run(self, call: Call) -> Findings | str:
        before = RandomState.now(call.tensors)
        first, differentiable = self._compute_with_graph(call, 0, min(self._rows, call.rows))
        findings = Findings(before.has_changed(), differentiable)
        if call.rows <= self._rows:
            return findings
        if findings.draws_random_numbers:
            with _evaluation(self._block):
                return self._compared(call, self._compute(call, 0, self._rows), findings)
        return self._compared(call, first, findings)

    def _compared(self, call: Call, first: Joined, findings: Findings) -> Findings | str:
        """Compare rows that are computed together with those of two chunks, of which ``first`` is the first one."""
        end = self._rows + 1
        together, second = self._compute(call, 0, end), self._compute(call, self._rows, end)
        outputs = enumerate(zip(together.tensors, first.tensors, second.tensors, strict=False))
        common = frozenset(
            order
            for order, (whole, *parts) in outputs
            if whole.dim() and len(whole) == 1 and all(whole.equal(part) for part in parts)
        )
        apart = Joined(self._name, end, common)
        apart.add(first.result(), 0, self._rows)
        apart.add(second.result(), self._rows, end)
        for one, two in zip(together.tensors, apart.tensors, strict=True):
            if one.shape != two.shape:
                return (
                    f"together they give a tensor of shape {tuple(one.shape)}, in chunks {tuple(two.shape)}"
                )
            difference = _relative_difference(one, two)
            if difference > DIFFERENCE.get(one.dtype, DIFFERENCE_IN_FP32):
                return f"its output differs by {difference:.2g} (relative) from that of all rows, so it mixes rows"
        return replace(findings, common=common)

    def _compute(self, call: Call, start: int, end: int) -> Joined:
        with torch.no_grad():
            return self._output(call, call.part(call.tensors, start, end), start, end)

    def _compute_with_graph(self, call: Call, start: int, end: int) -> tuple[Joined, tuple[bool, ...]]:
        """The output of a chunk, and which of its tensors have a graph.

        ConfigError if something else keeps a part of this graph.
        """
        token = _Token()
        alive = weakref.ref(token)
        # No hooks of a checkpoint around the block: it would wait for the same tensors in its recomputation.
        with torch.enable_grad(), saved_tensors_hooks(_drop, _lost):
            first_node = next_node()
            inputs = call.part(call.tensors, start, end)
            probed = [position for position, tensor in enumerate(inputs) if tensor.requires_grad] or [
                position for position in sorted(call.divided) if inputs[position].is_floating_point()
            ][:1]
            for position in probed:
                leaf = inputs[position].detach().requires_grad_()
                inputs[position] = _Probe.apply(leaf, token)  # type: ignore[no-untyped-call]
            versions = [tensor._version for tensor in inputs]
            output = self._output(call, inputs, start, end)
            self._refuse_outer_graph(output.tensors, first_node)
            edited = [tensor._version for tensor in inputs] != versions
            inputs.clear()
        differentiable = tuple(tensor.requires_grad for tensor in output.tensors)
        output.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in output.leaves]
        if edited:
            raise ConfigError(
                f"block_rows: block {self._name!r} changes an argument in place, which its recomputation needs as it"
                " was; change a copy in the block's forward, or remove block_rows"
            )
        del token
        if alive() is not None:
            gc.collect()
        if alive() is not None:
            raise ConfigError(
                f"block_rows: a tensor that block {self._name!r} computes is kept outside of its output: an auxiliary"
                " loss on a module, or what a hook records (output_router_logits, output_attentions). In chunks it"
                " would have no gradient, and the rows of one chunk only. Return it, do not request it, or remove"
                " block_rows"
            )
        return output, differentiable

    def _refuse_outer_graph(self, outputs: list[Tensor], first_node: int) -> None:
        """ConfigError if ``outputs`` were computed by a node from before ``first_node``."""
        for node in nodes_behind(outputs):
            if node._sequence_nr() < first_node:
                raise ConfigError(
                    f"block_rows: block {self._name!r} reads a tensor that was computed before it and is no argument of"
                    f" its call ({node.name()}): each chunk would go backward through the graph of that tensor. Pass it"
                    " as an argument, or remove block_rows"
                )

    def _output(self, call: Call, tensors: list[Tensor], start: int, end: int) -> Joined:
        args, kwargs = call.arguments(tensors)
        output = Joined(self._name, end - start)
        output.add(self._forward(*args, **kwargs), 0, end - start)
        return output


class _Token:
    """Lives as long as the graph that holds it."""


class _Probe(torch.autograd.Function):
    """The identity; its node holds a token."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: _Token) -> Tensor:
        ctx.token = token
        # Not a view, which the block could not change in place.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _drop(tensor: Tensor) -> None:
    """Nothing is kept for the backward that does not follow."""


def _lost(packed: None) -> Tensor:
    raise ConfigError(
        "block_rows: a block that runs a backward in its forward cannot run over chunks of rows"
    )


def _relative_difference(one: Tensor, two: Tensor) -> float:
    if not one.numel():
        return 0.0
    one, two = one.double(), two.double()
    finite = one.isfinite() & two.isfinite()
    if not bool((one.isfinite() == two.isfinite()).all()):
        return float("inf")
    one, two = one[finite], two[finite]
    size, difference = float(one.norm()), float((one - two).norm())
    return 0.0 if difference == 0.0 else difference / size if size else float("inf")


@contextmanager
def _undisturbed(block: nn.Module, tensors: list[Tensor]) -> Iterator[None]:
    """Random numbers and buffers are as before at the end."""
    random = RandomState.now(tensors)
    with torch.inference_mode(False), torch.no_grad():
        buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
        try:
            yield
        finally:
            for buffer, values in buffers:
                # A write counts as an edit.
                if not buffer.equal(values):
                    buffer.copy_(values)
            random.restore()


@contextmanager
def _evaluation(block: nn.Module) -> Iterator[None]:
    training = [module for module in block.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
