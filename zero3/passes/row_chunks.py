"""Blocks that run over chunks of rows: ``tiering.block_rows``.

A block's forward computes one chunk of rows after the other without gradients, and keeps only its inputs. Its backward
computes each chunk again with gradients, and goes backward through it before the next one. The block's parameters are
on the device once for all chunks, in forward and in backward. The gradients of chunks are accumulated one after the
other, as those of micro-batches are.

Note [Checkpoints around a block]
    A block that keeps its inputs needs no other checkpoint. transformers' layers checkpoint their own forward: that is
    bypassed. Around a call of the block, torch's non-reentrant checkpoint saves the inputs for us: they are the last
    tensors that it waits for, and it stops its recomputation as soon as it has seen them, before the block computes
    anything. So they are saved before the forward. Reentrant checkpoints run the whole recomputation. If it consists of
    this block alone, nobody reads its outputs, and only their shapes are computed, from one row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tiering import _logs
from tiering.errors import ConfigError, EngineStateError
from zero3.params.compilation import eager, is_compiled
from zero3.params.grouping import block_names
from zero3.params.param_group import ParamGroup
from zero3.passes.autocast import Autocast, without_copies
from zero3.passes.hooks import OurHook, in_transform
from zero3.passes.random_state import RandomState
from zero3.passes.row_arguments import Call, Joined
from zero3.passes.row_check import Findings, RowCheck

log = logging.getLogger(__name__)

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments that transformers drops where it checkpoints a layer: the recomputation would update them again."""


class RowEvents(Protocol):
    """Holds groups for a backward over chunks. See PassSchedule."""

    def rows(self, groups: Sequence[ParamGroup]) -> AbstractContextManager[Callable[[bool], None]]: ...


class RowChunks:
    """The blocks of ``model``, each of which runs over chunks of ``rows`` rows until ``remove``."""

    def __init__(
        self, model: nn.Module, groups: Iterable[ParamGroup], events: RowEvents, rows: int, *, alone: bool
    ) -> None:
        """``alone``: this process has no other ranks. ConfigError for a model that has no blocks."""
        groups = list(groups)
        modules = dict(model.named_modules())
        names = [name for name in modules if name in block_names(model)]
        if not names:
            raise ConfigError(
                "block_rows: the model has no blocks that could run over chunks of rows: entries of a ModuleList, or"
                " of a Sequential of one kind of module; remove block_rows"
            )
        if not alone:
            _refuse_inner_groups(groups, modules, names)
        self._blocks = [
            ChunkedBlock(
                name,
                modules[name],
                [group for group in groups if modules[name] in group.entries],
                events,
                rows,
            )
            for name in names
        ]
        for block in self._blocks:
            block.install()
        self._watch: RemovableHandle | None = model.register_forward_hook(_FirstForward(self._warn_if_unused))

    def remove(self) -> None:
        """The blocks compute all rows at once from now on."""
        for block in self._blocks:
            block.remove()
        self._end_watch()

    def _warn_if_unused(self) -> None:
        self._end_watch()
        if not any(block.was_called for block in self._blocks):
            log.log(
                _logs.once(logging.WARNING),
                "block_rows has no effect: the model calls the forward of none of its blocks (%s)",
                ", ".join(block.name for block in self._blocks),
            )

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


class _FirstForward(OurHook):
    """After the first forward of the model with gradients."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def run(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._run()


def _refuse_inner_groups(
    groups: Iterable[ParamGroup], modules: dict[str, nn.Module], names: Iterable[str]
) -> None:
    """ConfigError for groups inside of blocks: ranks would gather them as often as each has chunks."""
    for name in names:
        inside = {module for module in modules[name].modules() if module is not modules[name]}
        for group in groups:
            if group.sharded and not inside.isdisjoint(group.entries):
                raise ConfigError(
                    f"block_rows: {group.name!r} is gathered apart from the block {name!r} around it (a leaf module),"
                    " which is not supported with several ranks in this version; remove the leaf module, or block_rows"
                )


class ChunkedBlock:
    """The forward of ``block`` over chunks of ``rows`` rows. ``groups``: those that a call of the block unshards."""

    def __init__(
        self, name: str, block: nn.Module, groups: list[ParamGroup], events: RowEvents, rows: int
    ) -> None:
        self.name = name
        self.was_called = False
        self.events = events
        self.groups = groups
        self._block = block
        self.rows = rows
        self._is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(block).__mro__)
        self._own: Any = block.__dict__.get("forward")
        self._is_installed = False
        # Of parameters, which live as long as the engine.
        self._parameters = {id(param) for param in block.parameters()}
        self._check = RowCheck(name, block, self.compute, rows)
        # inspect.signature follows it.
        self.__wrapped__: Callable[..., Any] = block.forward

    def install(self) -> None:
        """Let calls of the block run over chunks."""
        self._is_installed = True
        self._block.forward = self

    def remove(self) -> None:
        """Undo ``install``. A wrapper that another library has put around it meanwhile stays, without effect."""
        self._is_installed = False
        if self._block.__dict__.get("forward") is self:
            if self._own is None:
                del self._block.forward
            else:
                self._block.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _ordinary_forward(memo.get(id(self._block), self._block))

    def __reduce__(self) -> Any:
        return _ordinary_forward, (self._block,)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        params = list(self._block.parameters())
        # torch.func.functional_call shows copies for the time of the call only: no recomputation would see them.
        has_copies = not self._parameters.issuperset(map(id, params))
        if not self._is_installed or in_transform() or has_copies:
            return self.__wrapped__(*args, **kwargs)
        with_grad = torch.is_grad_enabled()
        # In training this may be the forward of a reentrant checkpoint: its recomputation draws numbers chunk by chunk.
        if not with_grad and not self._block.training and self._is_watched():
            return self.__wrapped__(*args, **kwargs)
        try:
            call, findings = self._divided(args, kwargs)
        except ConfigError:
            if with_grad:
                raise
            # Without a backward, all rows at once are right; they only take more memory.
            return self.__wrapped__(*args, **kwargs)
        trained = any(param.requires_grad for param in params)
        if not with_grad or not (trained or any(tensor.requires_grad for tensor in call.tensors)):
            return self.run(call, findings).result()
        without_values = False
        if _recomputes_alone(self._block):
            if call.rows <= self.rows:
                return self.compute(*args, **kwargs)
            without_values = not findings.draws_random_numbers
        work = _Work(self, call, findings, without_values=without_values)
        # Before the forward: see Note [Checkpoints around a block].
        start = torch.empty(0, device="cpu", requires_grad=True)
        kept: Tensor = _KeptInputs.apply(start, *call.tensors)  # type: ignore[no-untyped-call]
        work.inputs = kept.grad_fn
        outputs = _Chunked.apply(  # type: ignore[no-untyped-call]
            work, start, *(tensor for tensor in call.tensors if tensor.requires_grad)
        )
        return work.result(outputs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward for one chunk, without a checkpoint of its own."""
        if not (self._is_layer and self._block.training):
            return self.__wrapped__(*args, **kwargs)
        with _set(self._block, gradient_checkpointing=True, _gradient_checkpointing_func=_call):
            return self.__wrapped__(*args, **kwargs)

    def _is_watched(self) -> bool:
        """Whether hooks of others see the outputs of modules inside of the block: in a chunk, those of its rows."""
        return any(
            not isinstance(hook, OurHook)
            for module in self._block.modules()
            if module is not self._block
            for hook in module._forward_hooks.values()
        )

    def _divided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Findings]:
        call = Call(args, kwargs)
        if not call.divided:
            raise ConfigError(
                f"block_rows: block {self.name!r} was called without a tensor that has rows; remove block_rows"
            )
        unused = CACHES if self._is_layer and self._block.training else ()
        caches = []
        for position, value in call.unknown():
            name = call.name_of(position, self.__wrapped__)
            if name in unused:
                caches.append(position)
            else:
                raise ConfigError(
                    f"block_rows: argument {name!r} of block {self.name!r} is a {type(value).__name__}, of which the"
                    " rows of a chunk are not known; pass a tensor (instead of a cache: use_cache=False), or remove"
                    " block_rows"
                )
        if is_compiled(self._block):
            log.log(
                _logs.once(logging.WARNING),
                "block_rows: the forward of block %r is not compiled; compile the modules inside of it instead",
                self.name,
            )
        call.drop(caches)
        return self._check.divide(call)

    def run(self, call: Call, findings: Findings, states: list[RandomState] | None = None) -> Joined:
        """The output for all rows; adds to ``states`` the random numbers' state at the beginning of each chunk."""
        joined = Joined(self.name, call.rows, findings.common)
        with without_copies():
            for start, end in call.chunks(self.rows):
                if states is not None:
                    states.append(RandomState.now(call.tensors))
                args, kwargs = call.arguments(call.part(call.tensors, start, end))
                joined.add(self.compute(*args, **kwargs), start, end)
        return joined

    def run_without_values(self, call: Call, findings: Findings) -> Joined:
        """Outputs of the shapes that ``run`` gives, and not a number in each place."""
        args, kwargs = call.arguments(call.part(call.tensors, 0, 1))
        joined = Joined(self.name, 1)
        joined.add(self.compute(*args, **kwargs), 0, 1)
        outputs = [
            _without_values(tensor, 1 if order in findings.common else call.rows)
            for order, tensor in enumerate(joined.tensors)
        ]
        joined.replace(outputs)
        return joined


def _without_values(tensor: Tensor, rows: int) -> Tensor:
    result = tensor.new_empty((rows, *tensor.shape[1:]))
    return result.fill_(float("nan")) if result.is_floating_point() else result.zero_()


def _ordinary_forward(block: nn.Module) -> Callable[..., Any]:
    """The forward of a copy of a block, as its class defines it."""
    return MethodType(type(block).forward, block)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Takes the place of a checkpoint function."""
    return function(*args, **kwargs)


def _recomputes_alone(block: nn.Module) -> bool:
    """Whether a reentrant checkpoint of ``block`` alone recomputes it, and nobody else sees its outputs."""
    function = getattr(torch._C._current_autograd_node(), "run_function", None)
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", function) is block and all(
        isinstance(hook, OurHook)
        for hook in (*block._forward_hooks.values(), *nn.modules.module._global_forward_hooks.values())
    )


class _Work:
    """One call of a block that backward can follow: what it keeps beside its input tensors."""

    def __init__(self, block: ChunkedBlock, call: Call, findings: Findings, *, without_values: bool) -> None:
        self.block = block
        # The node that keeps the input tensors; None once a backward has used them up.
        self.inputs: Any = None
        self._call = call
        self._findings = findings
        self._without_values = without_values
        self._autocast = Autocast(call.tensors)
        self._requires_grad = [tensor.requires_grad for tensor in call.tensors]
        self._states: list[RandomState] = []
        self._output: Joined | None = None

    def forward(self) -> list[Tensor]:
        """The tensors of the output for all rows."""
        if self._without_values:
            self._states = [RandomState.now(self._call.tensors)] * len(self._call.chunks(self.block.rows))
            self._output = self.block.run_without_values(self._call, self._findings)
        else:
            self._output = self.block.run(self._call, self._findings, self._states)
        # Autograd keeps them.
        self._call.forget_tensors()
        return self._output.tensors

    def without_graph(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``outputs`` that depend on nothing that requires a gradient."""
        flags = self._findings.differentiable
        if len(flags) != len(outputs):
            return []
        return [output for output, has_graph in zip(outputs, flags, strict=True) if not has_graph]

    def check_backward(self) -> None:
        """Raises for a backward that cannot go through chunks, or comes a second time without ``retain_graph``."""
        block = f"block {self.block.name!r}, which runs over chunks of rows (block_rows)"
        if torch.is_grad_enabled():
            raise EngineStateError(
                f"gradients of gradients (create_graph=True) are not supported for {block}"
            )
        if not torch.autograd._is_checkpoint_valid():
            raise EngineStateError(
                f"torch.autograd.grad, and backward(inputs=...), cannot go through {block}: use backward() and read"
                " .grad, or remove block_rows"
            )
        if self.inputs is None:
            raise RuntimeError(
                f"Trying to backward through the graph a second time, in {block}; specify retain_graph=True in the"
                " first backward"
            )

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The output of the block, whose tensors are ``outputs``."""
        assert self._output is not None
        self._output.replace(outputs)
        result, self._output = self._output.result(), None
        return result

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Go backward chunk by chunk. Returns the gradients of the inputs that require one."""
        sums = _InputGradients(self._call, tensors, self._requires_grad)
        surrounding = RandomState.now(tensors)
        chunks = self._call.chunks(self.block.rows)
        with self.block.events.rows(self.block.groups) as begin_chunk:
            try:
                for number, (start, end) in enumerate(chunks):
                    begin_chunk(number == len(chunks) - 1)
                    leaves = [
                        each.detach().requires_grad_(requires_grad)
                        for each, requires_grad in zip(
                            self._call.part(tensors, start, end), self._requires_grad, strict=True
                        )
                    ]
                    outputs = self._recompute(leaves, self._states[number])
                    rows = slice(start, end) if len(chunks) > 1 else None
                    _go_backward(outputs, self._gradients_of(rows, gradients))
                    sums.add(leaves, start, end)
            finally:
                surrounding.restore()
        return sums.result()

    def _gradients_of(
        self, rows: slice | None, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The parts of ``gradients`` for the chunk of ``rows``; None: all rows."""
        if rows is None:
            return gradients
        parts = [None if gradient is None else gradient[rows] for gradient in gradients]
        for order in self._findings.common:
            # What all rows share was computed in the first chunk.
            parts[order] = gradients[order] if rows.start == 0 else None
        return parts

    def _recompute(self, leaves: Sequence[Tensor], state: RandomState) -> list[Tensor]:
        state.restore()
        args, kwargs = self._call.arguments(leaves)
        with torch.enable_grad(), self._autocast.again():
            output = self.block.compute(*args, **kwargs)
        if self._without_values and state.has_changed():
            raise EngineStateError(
                f"block_rows: block {self.block.name!r} draws random numbers, which it did not when it was first"
                " called: a reentrant checkpoint does not repeat those of a chunk. Use use_reentrant=False, or remove"
                " the checkpoint: block_rows is one"
            )
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


class _InputGradients:
    """Adds up the gradients of a call's inputs, chunk by chunk."""

    def __init__(self, call: Call, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> None:
        self._call = call
        self._tensors = tensors
        self._requires_grad = requires_grad
        self._sums: list[Tensor | None] = [None] * len(tensors)

    def add(self, leaves: Sequence[Tensor], start: int, end: int) -> None:
        """Backward has gone through the chunk of rows from ``start`` to ``end``, whose inputs are ``leaves``."""
        is_all = end - start == self._call.rows
        for position, leaf in enumerate(leaves):
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            total = self._sums[position]
            if is_all or (total is None and position not in self._call.divided):
                self._sums[position] = gradient
                continue
            if total is None:
                whole = self._tensors[position]
                total = self._sums[position] = whole.new_zeros(whole.shape)
            if position in self._call.divided:
                total[start:end] = gradient
            else:
                total += gradient

    def result(self) -> list[Tensor | None]:
        """The gradients of the inputs that require one."""
        pairs = zip(self._sums, self._requires_grad, strict=True)
        return [total for total, requires_grad in pairs if requires_grad]


def _go_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Go backward from the outputs of a chunk."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if pairs:
        tensors, parts = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, parts)


class _KeptInputs(torch.autograd.Function):
    """A node that keeps the input tensors of a block. No gradient reaches it."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the output of this node is not used")


class _Chunked(torch.autograd.Function):
    """A block over chunks of rows. Its inputs: the work, a tensor that requires a gradient, and those that do."""

    @staticmethod
    def forward(ctx: Any, work: _Work, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.work = work
        ctx.set_materialize_grads(False)
        outputs = work.forward()
        ctx.mark_non_differentiable(*work.without_graph(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        work.check_backward()
        tensors = work.inputs.saved_tensors
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # As torch does with the tensors that a node saves.
            work.inputs = None
        return None, None, *work.backward(tensors, gradients)


@contextmanager
def _set(block: nn.Module, **values: Any) -> Iterator[None]:
    """Attributes of ``block`` within the context."""
    before = {name: block.__dict__[name] for name in values if name in block.__dict__}
    block.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del block.__dict__[name]
        block.__dict__.update(before)
