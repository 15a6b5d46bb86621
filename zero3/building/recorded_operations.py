"""What a tape is made of: operations, and the memory that they read and wrote. See tape.py for what it is good for."""

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

SMALL = 64 << 10  # bytes of a constant that is copied, so that it may change

_EMPTY = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}


class Cell:
    """The memory of one storage, and the operations that wrote to it, as far back as anybody may need them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.writes: list[Record] = []
        self.was_read = False  # by what other cells came from: then its past matters for ever
        self.kept = False  # its memory never goes: the tape does not know how its values come about
        self._living = StorageWeakRef(storage)  # also keeps the storage's identity from being used again

    @property
    def is_freed(self) -> bool:
        return bool(self._living.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while anything refers to it."""
        if self.is_freed:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._living.cdata)
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
        """The tensor, over a storage with the cell's bytes."""
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
    """A tensor that the tape has not seen made."""

    tensor: Tensor
    mark: int  # other values have another one

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        tensor = tensor.detach()  # the values that it has now, whatever becomes of a parameter
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
    """A checksum, for numpy and ``.data`` change values without another version; elsewhere than here the version."""
    if not has_memory(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor._version
    dense = tensor.contiguous()
    nbytes = dense.numel() * dense.element_size()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(dense.data_ptr())) if nbytes else 0


def has_memory(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are those in its storage, on the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


@dataclass(eq=False)
class Record:
    """One operation that wrote to cells, or made them."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    reads: set[Cell]
    writes: set[Cell]
    new_cells: list[Cell | None] = field(default_factory=list)  # by output; None: no new memory
    overwritten: Cell | None = None  # what was in it before does not matter
    default_dtype: torch.dtype = torch.float32
    generator: torch.Generator | None = None
    random_state: Tensor | None = None

    @property
    def makes_empty(self) -> bool:
        """Whether this only made memory without values."""
        return bool(self.new_cells) and self.func.overloadpacket.__name__ in _EMPTY

    def needs(self) -> Iterator[Cell]:
        """The cells whose values from before it matter."""
        if not self.makes_empty:
            yield from (self.reads | self.writes) - set(self.new_cells) - {self.overwritten}

    def run(self, tensor_of: Callable[[Slice | Constant], Tensor]) -> list[Tensor]:
        """Do it again, as it was done then. Returns the outputs."""
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
