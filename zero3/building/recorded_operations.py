"""The records of a tape: operations, and the memory that they read and wrote. tape.py explains their use."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tiering.errors import ConfigError

# Bytes: constants up to this size are copied, so that the original may change.
SMALL = 64 << 10

_EMPTY = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}


class Cell:
    """The memory of one storage, and the operations that wrote to it, as far back as they may be needed."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.writes: list[Record] = []
        # Whether an operation that wrote to other cells has read this cell: its earlier writes are needed then.
        self.was_read = False
        # Whether its memory stays, because the tape does not know how its values were computed.
        self.stays_in_memory = False
        # The reference also prevents that the identity of the storage is used again.
        self._reference = StorageWeakRef(storage)

    @property
    def is_freed(self) -> bool:
        return bool(self._reference.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while a tensor refers to it."""
        if self.is_freed:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


@dataclass(frozen=True)
class Slice:
    """A tensor as a range of a cell."""

    cell: Cell
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor, cell: Cell) -> Slice:
        offset, shape = int(tensor.storage_offset()), tuple(tensor.size())
        return cls(cell, tensor.dtype, shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor on ``storage``, which has the bytes of the cell."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storage, self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    @property
    def span(self) -> range:
        """The bytes of the cell from its first element to its last."""
        if 0 in self.shape:
            return range(0)
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        itemsize = self.dtype.itemsize
        return range(self.offset * itemsize, (self.offset + last + 1) * itemsize)

    def covers_its_cell(self) -> bool:
        numel, dense = 1, True
        for size, stride in sorted(zip(self.shape, self.stride, strict=True), key=lambda axis: axis[1]):
            dense = dense and (size == 1 or stride == numel)
            numel *= size
        return dense and numel * self.dtype.itemsize == self.cell.nbytes


@dataclass(frozen=True)
class Constant:
    """A tensor that no recorded operation has made. ``mark`` changes with its values."""

    tensor: Tensor
    mark: int

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        # The current values: a parameter may later get other memory.
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= SMALL:
            tensor = tensor.clone()
        return cls(tensor, _mark(tensor))

    def get(self) -> Tensor:
        if _mark(self.tensor) != self.mark:
            raise ConfigError(
                f"a tensor of shape {tuple(self.tensor.shape)} from which parameters were computed under zero.Init was"
                " changed before they were needed; copy it first, or build this model without zero.Init"
            )
        return self.tensor


def _mark(tensor: Tensor) -> int:
    """A checksum, because numpy and ``.data`` change values without a new version; outside CPU memory the version."""
    if not has_memory(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor._version
    dense = tensor.contiguous()
    nbytes = dense.numel() * dense.element_size()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(dense.data_ptr())) if nbytes else 0


def has_memory(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are in its storage, on the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


@dataclass(eq=False)
class Record:
    """One operation that wrote to cells or made them.

    ``new_cells`` follows its outputs: None for an output without new memory. The previous contents of ``overwritten``
    do not matter.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    reads: set[Cell]
    writes: set[Cell]
    new_cells: list[Cell | None] = field(default_factory=list)
    overwritten: Cell | None = None
    default_dtype: torch.dtype = torch.float32
    generator: torch.Generator | None = None
    random_state: Tensor | None = None

    @property
    def makes_empty(self) -> bool:
        """Whether the operation only allocated memory without values."""
        return bool(self.new_cells) and self.func.overloadpacket.__name__ in _EMPTY

    def needs(self) -> Iterator[Cell]:
        """The cells whose values before the operation it uses."""
        if not self.makes_empty:
            yield from (self.reads | self.writes) - set(self.new_cells) - {self.overwritten}

    def run(self, tensor_of: Callable[[Slice | Constant], Tensor]) -> list[Tensor]:
        """Run the operation again with the same default dtype and random state. Returns the outputs."""
        args, kwargs = mapped(self.args, tensor_of), mapped(self.kwargs, tensor_of)
        default_dtype = torch.get_default_dtype()
        generator = self.generator if self.generator is not None else torch.default_generator
        state = generator.get_state() if self.random_state is not None else None
        try:
            torch.set_default_dtype(self.default_dtype)
            if self.random_state is not None:
                generator.set_state(self.random_state)
            out = self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_dtype)
            if state is not None:
                generator.set_state(state)
        return [value for value in flat(out) if isinstance(value, Tensor)]


def flat(values: Any) -> Iterator[Any]:
    """The leaves of nested arguments."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        yield values
        return
    for value in values:
        yield from flat(value)


def mapped(values: Any, leaf: Callable[[Any], Any], kinds: Any = (Slice, Constant)) -> Any:
    """Nested arguments with ``leaf`` in place of each leaf of ``kinds``."""
    if isinstance(values, dict):
        return {key: mapped(value, leaf, kinds) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [mapped(value, leaf, kinds) for value in values]
    return leaf(values) if isinstance(values, kinds) else values
