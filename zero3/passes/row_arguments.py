"""The arguments of a block's call, divided into rows, and the outputs of its chunks, joined along rows.

The rows of a call are dimension 0 of its first tensor argument. Tensors with as many rows are divided, in lists, tuples
and dictionaries too; all other tensors are passed whole. An object that torch's pytree does not know could hold rows
that nobody can divide (a KV cache), so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tiering._text import counted
from tiering.errors import ConfigError

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


class Call:
    """The arguments of one call of a block: the ``tensors`` among them, and everything else.

    Methods take the tensors from their caller, because autograd keeps them between forward and backward.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Collection[int] = ()) -> None:
        """``whole``: positions among the tensors of those that are known to have no rows."""
        self._whole = whole
        leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_plain_sequence)
        self._at = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[position] for position in self._at]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.rows = next((len(tensor) for tensor in self.tensors if tensor.dim()), 0)
        self.divided = frozenset(
            position
            for position, tensor in enumerate(self.tensors)
            if tensor.dim() and len(tensor) == self.rows and position not in whole
        )
        # Their first dimension is neither 1, which is broadcast, nor the number of rows.
        self.without_rows = frozenset(
            position
            for position, tensor in enumerate(self.tensors)
            if tensor.dim() and len(tensor) not in (1, self.rows)
        )

    @property
    def dims(self) -> tuple[int, ...]:
        """The number of dimensions of each tensor."""
        return tuple(tensor.dim() for tensor in self.tensors)

    @property
    def signature(self) -> tuple[object, ...]:
        """What decides how the call is divided. Two calls of one block with equal signatures are divided alike."""
        tensors = tuple(
            (position in self.divided, tensor.dim(), tensor.requires_grad)
            for position, tensor in enumerate(self.tensors)
        )
        # Options of a call, such as output_attentions.
        options = tuple(leaf if isinstance(leaf, bool) else leaf is None for leaf in self._others)
        return tensors, options

    def unknown(self) -> Iterator[tuple[int, Any]]:
        """The arguments that cannot be divided, and cannot be passed whole: position and value."""
        for position, leaf in enumerate(self._others):
            if isinstance(leaf, list | tuple):
                if self.rows > 1 and len(leaf) == self.rows:
                    yield position, leaf
            elif not isinstance(leaf, PLAIN) and not callable(leaf):
                yield position, leaf

    def chunks(self, rows: int) -> list[tuple[int, int]]:
        """The first row of each chunk of ``rows`` rows, and the row behind its last one."""
        # No rows, as in an empty micro-batch, are one chunk.
        return [(start, min(start + rows, self.rows)) for start in range(0, self.rows or 1, rows)]

    def part(self, tensors: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
        """``tensors`` with the rows from ``start`` to ``end`` of those that are divided: views."""
        if end - start == self.rows:
            return list(tensors)
        return [
            tensor[start:end] if position in self.divided else tensor
            for position, tensor in enumerate(tensors)
        ]

    def drop(self, positions: Iterable[int]) -> None:
        """Put None in the place of the arguments at ``positions`` of all leaves, which are not tensors."""
        for position in positions:
            self._others[position] = None

    def passing_whole(self, positions: Collection[int]) -> Call:
        """The same call, in which the tensors at ``positions`` among the tensors are passed whole."""
        return Call(*self.arguments(self.tensors), {*self._whole, *positions})

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with ``tensors`` in the place of its own."""
        leaves = list(self._others)
        for position, tensor in zip(self._at, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def forget_tensors(self) -> None:
        """Drop the tensors, which autograd keeps from now on."""
        self.tensors = []

    def name_of(self, position: int, forward: Callable[..., Any]) -> str:
        """The name of the argument at ``position`` of all leaves, as ``forward`` calls it."""
        indices = list(range(len(self._others)))
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(indices, self._structure))
        path: tuple[Any, ...] = paths[position][0]
        (_, first, *inner) = path
        if isinstance(first, pytree.SequenceKey):
            names = list(inspect.signature(forward).parameters)
            name = names[first.idx] if first.idx < len(names) else f"argument {first.idx}"
        else:
            name = first.key
        return f"{name}{pytree.keystr(tuple(inner))}"

    def describe(self, forward: Callable[..., Any], *, divided: bool) -> str:
        """The names and shapes of the tensors that are ``divided``, or of those that are not."""
        return ", ".join(
            f"{self.name_of(self._at[position], forward)} {tuple(tensor.shape)}"
            for position, tensor in enumerate(self.tensors)
            if (position in self.divided) == divided
        )


def _is_plain_sequence(value: Any) -> bool:
    """Whether ``value`` is a list of numbers or names, which is passed whole."""
    return (
        isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, PLAIN) for each in value)
    )


class Joined:
    """The outputs of the chunks of one call of ``block``, joined along rows.

    ``common``: positions among the tensors of those that all rows share, so that the first chunk's is that of the call.
    """

    def __init__(self, block: str, rows: int, common: Collection[int] = ()) -> None:
        self._block = block
        self._rows = rows
        self._common = common
        self._structure: pytree.TreeSpec | None = None
        self.leaves: list[Any] = []

    def add(self, output: Any, start: int, end: int) -> None:
        """``output`` is that of the rows from ``start`` to ``end``. ConfigError if it cannot be joined."""
        leaves, structure = pytree.tree_flatten(output)
        if end - start == self._rows:
            self.leaves, self._structure = leaves, structure
            return
        if self._structure is None:
            self._structure = structure
            self.leaves = list(leaves)
            for order, position in enumerate(_tensors_among(leaves)):
                if order not in self._common:
                    self.leaves[position] = self._room_for(leaves[position])
        if structure != self._structure:
            raise ConfigError(self._refusal("outputs of another structure for other rows", ""))
        orders = {position: order for order, position in enumerate(_tensors_among(leaves))}
        for position, (leaf, joined) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(leaf, Tensor) and isinstance(joined, Tensor):
                if orders[position] in self._common and leaf.shape == joined.shape:
                    continue
                if leaf.dim() and len(leaf) == end - start and leaf.shape[1:] == joined.shape[1:]:
                    joined[start:end] = leaf
                    continue
                problem = f"a tensor of shape {tuple(leaf.shape)} for {counted(end - start, 'row')}"
                raise ConfigError(self._refusal(problem, _output_name(output, position)))
            if not isinstance(leaf, PLAIN) or leaf != joined:
                raise ConfigError(
                    self._refusal(f"an object of {type(leaf).__name__}", _output_name(output, position))
                )

    def result(self) -> Any:
        """The output for all rows."""
        assert self._structure is not None
        return pytree.tree_unflatten(self.leaves, self._structure)

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Put ``tensors`` in the place of those of the output."""
        following = iter(tensors)
        self.leaves = [next(following) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the output, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def _room_for(self, leaf: Tensor) -> Tensor:
        # Not a concatenation at the end: it would need the outputs of all chunks twice.
        return leaf.new_empty((self._rows, *leaf.shape[1:]))

    def _refusal(self, problem: str, where: str) -> str:
        return (
            f"block_rows: block {self._block!r} returns {problem}{f' ({where})' if where else ''}, which has no rows to"
            " join, for example an auxiliary loss or a cache; let the block return tensors with one row for each row of"
            " its input, or remove block_rows and use more micro-batches"
        )


def _tensors_among(leaves: Sequence[Any]) -> list[int]:
    return [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def _output_name(output: Any, position: int) -> str:
    path = pytree.tree_flatten_with_path(output)[0][position][0]
    return f"output{pytree.keystr(path)}"
