"""The tape: records operations on tensors, so that their memory can be freed and their values computed again.

Note [Values that come again]
    A model's initial values are a function of code and random state, not data. Instead of the values, the tape keeps
    the operations that computed them. While it runs, it records each operation that writes to memory, with its
    arguments: not as tensors, but as ranges of *cells*; a cell is the memory of one storage. Views need no record. A
    random operation is recorded with the state of its generator. Operations run as usual and return real values, so
    code that reads them (a loop until no sample is out of range) takes its usual path.

    The memory of a parameter may then be freed at any time. The next read restores it: the operations that wrote to it
    run again, in order, and those that computed their inputs; all others are skipped. An operation that overwrites a
    whole cell needs none of its previous contents, so values that a constructor sets and an initializer replaces are
    never computed again. Each parameter can be computed by itself, in any order, with bits that do not depend on the
    others.

    A tensor that no recorded operation has made (an older one, or one from numpy or a file) is a constant: it is kept,
    and must not change. Some accesses are not operations, so the tape also watches function calls. Some functions read
    memory (printing), which must be restored before. Some expose memory (numpy), which may then change unseen; such
    memory is kept. Memory that operations outside torch's own namespaces have written is kept as well.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero3.building.recorded_operations import Cell, Constant, Record, Slice, flat, has_memory, mapped
from zero3.device import heap

# Bytes: smaller storages are not freed.
SMALLEST_FREED = 64 << 10
# Bytes that may be allocated before memory is freed.
GROWTH_LIMIT = 64 << 20

_OVERWRITES = {
    "zero_",
    "fill_",
    "copy_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
}
# Operations that change which memory a tensor has.
_MOVES_MEMORY = {"set_", "resize_", "resize_as_"}
# Namespaces of operations whose results depend only on arguments and on the state of torch's generators.
_OWN = {"aten", "prims"}

# Functions that read memory without operations that the tape sees.
_READS = {"__format__", "__repr__", "as_tensor", "asarray", "new_tensor", "tensor", "tolist"}
# Functions that expose memory, which may then change unseen.
_EXPOSES = {
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "_typed_storage",
    "apply_",
    "data_ptr",
    "map2_",
    "map_",
    "numpy",
    "share_memory_",
    "storage",
    "untyped_storage",
}


class Tape(TorchDispatchMode):
    """See Note [Values that come again]. A context for one thread; ``slice_of`` and ``replay`` work afterwards, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        # By identity of the storage.
        self._cells: dict[int, Cell] = {}
        # Parameters whose memory may be freed, by id.
        self._params: dict[int, nn.Parameter] = {}
        self._number = 0
        # The cell that was replayed last for a part of it, with its memory: the next part may be of the same cell.
        self._replayed: tuple[Cell, torch.UntypedStorage] | None = None
        # Bytes allocated since memory was last freed.
        self._grown = 0
        self._prune_at = 1024
        self._function_calls = _FunctionCalls(self)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call] # torch's
        self._function_calls.__enter__()  # type: ignore[no-untyped-call] # torch's
        return self

    def __exit__(self, *error: object) -> None:
        self._function_calls.__exit__(*error)  # type: ignore[no-untyped-call] # torch's
        super().__exit__(*error)  # type: ignore[no-untyped-call] # torch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would load its compiler, only to exclude this class.
        return False

    def may_free(self, param: nn.Parameter) -> None:
        """Allow the tape to free the memory of ``param`` between operations."""
        if not nn.parameter.is_lazy(param):
            self._params[id(param)] = param

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that were passed to ``may_free``."""
        return list(self._params.values())

    def slice_of(self, param: nn.Parameter) -> Slice | None:
        """The slice from which ``param`` can be computed again; None if it cannot."""
        cell = self._cell_of(param)
        return Slice.of(param, cell) if cell is not None and not cell.stays_in_memory else None

    def restore(self, tensor: Tensor, *, keep: bool) -> None:
        """Restore the values of ``tensor`` in memory; with ``keep`` they stay there while the tensor exists."""
        cell = self._cell_of(tensor)
        if cell is not None:
            # Replayed operations are not recorded again.
            with torch._C._DisableTorchDispatch():
                self._restore(cell)
            cell.stays_in_memory = cell.stays_in_memory or keep

    def finish(self) -> None:
        """Drop the state that is needed only while the tape runs. Tensors that still exist get their memory back."""
        for cell in self._cells.values():
            self._restore(cell)
        self._cells.clear()
        self._params.clear()
        heap.trim()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Calls of the tape itself are not watched.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in flat((args, kwargs)) if isinstance(value, Tensor)]
        cells = [self._cell_of(tensor) for tensor in tensors]
        written_tensors = _written_tensors(func, args, kwargs)
        overwritten = self._overwritten(func, tensors, cells)
        if self._grown > GROWTH_LIMIT:
            self._free(keep={cell for cell in cells if cell is not None})
        for tensor, cell in zip(tensors, cells, strict=True):
            if (
                cell is not None
                and not cell.stays_in_memory
                and tensor.untyped_storage().nbytes() < cell.nbytes
            ):
                self._reallocate(tensor.untyped_storage(), cell, with_values=cell is not overwritten)
        record = self._note(func, args, kwargs, written_tensors, overwritten)
        out = func(*args, **kwargs)
        self._note_outputs(record, out, tensors)
        if not record.writes:
            return out
        self._number += 1
        unknown = func.overloadpacket.__name__ in _MOVES_MEMORY or func.namespace not in _OWN
        if unknown or any(cell.stays_in_memory for cell in record.needs()):
            for cell in record.writes:
                cell.stays_in_memory = True
        if overwritten is not None and not overwritten.was_read:
            # No record needs the previous contents.
            overwritten.writes.clear()
        for cell in record.writes:
            cell.writes.append(record)
        for cell in record.needs():
            if record.writes != {cell}:
                cell.was_read = True
        return out

    def replay(self, target: Slice) -> Tensor:
        """The last values of ``target``: in new memory, or a part of the memory that its cell got last."""
        if target.covers_its_cell():
            return target.on(_replay(target.cell, None))
        if self._replayed is None or self._replayed[0] is not target.cell:
            # First: the memory of two cells at once may be too much.
            self._replayed = None
            self._replayed = target.cell, _replay(target.cell, None)
        return target.on(self._replayed[1])

    def drop_replayed(self) -> None:
        """Free the memory that was kept for the next part of its cell."""
        self._replayed = None

    def _cell_of(self, tensor: Tensor) -> Cell | None:
        if not has_memory(tensor):
            return None
        with torch._C.DisableTorchFunction():
            return self._cells.get(tensor.untyped_storage()._cdata)

    def _note(
        self, func: Any, args: Any, kwargs: Any, written_tensors: list[Tensor], overwritten: Cell | None
    ) -> Record:
        """Record an operation before it runs, because it may change its inputs."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") if random else None
        source = generator if generator is not None else torch.default_generator
        reads: set[Cell] = set()

        def noted(tensor: Tensor) -> Slice | Constant:
            cell = self._cell_of(tensor)
            if cell is None:
                return Constant.of(tensor)
            reads.add(cell)
            return Slice.of(tensor, cell)

        writes = {cell for tensor in written_tensors if (cell := self._cell_of(tensor)) is not None}
        return Record(
            self._number,
            func,
            mapped(args, noted, Tensor),
            mapped(kwargs, noted, Tensor),
            reads=reads,
            writes=writes,
            overwritten=overwritten,
            default_dtype=torch.get_default_dtype(),
            generator=generator,
            random_state=source.get_state() if random and source.device.type == "cpu" else None,
        )

    def _note_outputs(self, record: Record, out: Any, tensors: list[Tensor]) -> None:
        """Make cells for the memory that an operation allocated."""
        input_storages = {t.untyped_storage()._cdata for t in tensors if has_memory(t)}
        for value in flat(out):
            if not isinstance(value, Tensor):
                continue
            cell = None
            if has_memory(value):
                storage = value.untyped_storage()
                if storage._cdata not in input_storages:
                    cell = self._cells[storage._cdata] = Cell(storage)
                    self._grown += cell.nbytes if cell.nbytes >= SMALLEST_FREED else 0
                    record.writes.add(cell)
            record.new_cells.append(cell)
        if len(self._cells) > self._prune_at:
            self._cells = {key: cell for key, cell in self._cells.items() if not cell.is_freed}
            self._prune_at = 2 * len(self._cells) + 1024

    def _overwritten(self, func: Any, tensors: list[Tensor], cells: list[Cell | None]) -> Cell | None:
        """The cell that ``func`` wholly overwrites without reading it."""
        if func.overloadpacket.__name__ not in _OVERWRITES or not cells:
            return None
        target = cells[0]
        if target is None or target in cells[1:]:
            return None
        return target if Slice.of(tensors[0], target).covers_its_cell() else None

    def _free(self, keep: set[Cell]) -> None:
        """Free the memory of all parameters except the cells in ``keep``, which are in use."""
        self._grown = 0
        for param in self._params.values():
            cell = self._cell_of(param)
            if cell is None or cell in keep or cell.nbytes < SMALLEST_FREED:
                continue
            storage = param.untyped_storage()
            # A storage that cannot be resized is shared with numpy.
            cell.stays_in_memory = cell.stays_in_memory or not storage.resizable()
            if not cell.stays_in_memory:
                storage.resize_(0)
        heap.trim()

    def _restore(self, cell: Cell) -> None:
        """Restore the bytes of ``cell`` if a tensor still refers to its memory."""
        storage = cell.storage()
        if storage is not None and storage.nbytes() < cell.nbytes:
            self._reallocate(storage, cell, with_values=True)

    def _reallocate(self, storage: torch.UntypedStorage, cell: Cell, *, with_values: bool) -> None:
        storage.resize_(cell.nbytes)
        self._grown += cell.nbytes
        if with_values:
            _replay(cell, storage)


class _FunctionCalls(TorchFunctionMode):
    """Reports function calls to the tape that are no operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS or name in _EXPOSES:
            for value in flat((args, kwargs)):
                if isinstance(value, Tensor):
                    self._tape.restore(value, keep=name in _EXPOSES)
        return func(*args, **kwargs)


def _replay(target: Cell, into: torch.UntypedStorage | None) -> torch.UntypedStorage:
    """Run the operations that computed ``target`` again, in a new storage or in ``into``."""
    records = _records_for(target)
    last_use: dict[Cell, int] = {}
    for record in records:
        last_use.update(dict.fromkeys(record.reads | record.writes, record.number))
    storages: dict[Cell, torch.UntypedStorage] = {}
    if into is not None:
        storages[target] = into

    def tensor_of(value: Slice | Constant) -> Tensor:
        if isinstance(value, Constant):
            return value.get()
        if value.cell not in storages:
            # The cell was allocated without values, and is overwritten now.
            storages[value.cell] = torch.UntypedStorage(value.cell.nbytes)
        return value.on(storages[value.cell])

    with torch.no_grad():
        for record in records:
            if record.makes_empty:
                continue
            outputs = record.run(tensor_of)
            for cell, output in zip(record.new_cells, outputs, strict=True):
                if cell is target and into is not None:
                    into.copy_(output.untyped_storage())
                elif cell is not None:
                    storages[cell] = output.untyped_storage()
            del outputs
            for cell in record.reads | record.writes:
                if cell is not target and last_use[cell] == record.number:
                    storages.pop(cell, None)
    if target not in storages:
        storages[target] = torch.UntypedStorage(target.nbytes)
    return storages[target]


def _records_for(target: Cell) -> list[Record]:
    """The operations that computed the last values of ``target``, in order."""
    needed: set[Record] = set()
    open_: list[tuple[Cell, float]] = [(target, float("inf"))]
    while open_:
        cell, before = open_.pop()
        last = next((record for record in reversed(cell.writes) if record.number < before), None)
        if last is not None and last not in needed:
            needed.add(last)
            open_ += [(input_cell, last.number) for input_cell in last.needs()]
    return sorted(needed, key=lambda record: record.number)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that ``func`` writes in place."""
    tensors = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in flat((value,)) if isinstance(leaf, Tensor)]
    return tensors
