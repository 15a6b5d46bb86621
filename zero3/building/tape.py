"""The tape: what was done to tensors while it ran, so that their memory can go and their values be made again.

Note [Values that come again]
    A model's initial values are a function of code and random state, not data: instead of keeping them, the tape keeps
    how they came about. While it runs, each operation that writes to memory is noted, and what it was done to: not
    tensors, but ranges of *cells*, a cell being the memory of one storage. Views need no note of their own. A random
    operation is noted with the state of its generator. Operations run as ever and give real values, so code that looks
    at them (a loop until no sample is out of range) takes the way it would have taken.

    The memory of a parameter may then be freed at any moment: whoever reads it next gets it back by doing again what
    was done to it, in order, and to what that read; all else on the tape is passed over. What is wholly overwritten
    needs nothing of what was there before, so the values that constructors give and an initialiser replaces are never
    made again. Each parameter can be made by itself, in any order, from bits that do not depend on the others.

    What the tape has not seen made (a tensor from before it ran, from numpy or a file) is a constant: it is kept, and
    must not change. What operations do not show is looked for among the functions that are called: some read memory
    themselves (printing), which has to be there, and some hand it out (numpy), after which it may change unseen; such
    memory is kept. So is what operations that are not torch's own have written.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero3.building.recorded_operations import Cell, Constant, Record, Slice, flat, has_memory, mapped
from zero3.device import heap

SMALLEST_FREED = 64 << 10  # bytes of a storage that is worth freeing
GROWTH_LIMIT = 64 << 20  # bytes that may come up before what can be freed is

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
_MOVES_MEMORY = {"set_", "resize_", "resize_as_"}  # after these a cell is no longer what it was
_OWN = {"aten", "prims"}  # whose operations do the same each time, given the state of torch's generators

# Functions that do not read by operations: the tape does not run in them, or they go to memory themselves.
_READS = {"__format__", "__repr__", "as_tensor", "asarray", "new_tensor", "tensor", "tolist"}
_HANDS_OUT = {
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
    """Note [Values that come again]. Runs as a context, in one thread; ``slice_of`` and ``replay`` work ever after."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._cells: dict[int, Cell] = {}  # by identity of the storage
        self._params: dict[int, nn.Parameter] = {}  # whose memory may go, by id
        self._number = 0
        self._grown = 0  # bytes since memory was last freed
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
        return False  # or torch would load its compiler, only to tell it not to compile this

    def may_go(self, param: nn.Parameter) -> None:
        """Let the memory of ``param`` be freed while nobody looks."""
        if not nn.parameter.is_lazy(param) and param.is_floating_point():
            self._params[id(param)] = param

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that were told of by ``may_go``."""
        return list(self._params.values())

    def slice_of(self, param: nn.Parameter) -> Slice | None:
        """How ``param`` can be made again; None when it cannot."""
        cell = self._cell_of(param)
        return Slice.of(param, cell) if cell is not None and not cell.kept else None

    def look(self, tensor: Tensor, *, keep: bool) -> None:
        """Let ``tensor`` have its values in memory: now, or for ``keep`` for as long as it lives."""
        cell = self._cell_of(tensor)
        if cell is not None:
            with torch._C._DisableTorchDispatch():  # what is done again is not to be noted again
                self._restore(cell)
            cell.kept = cell.kept or keep

    def finish(self) -> None:
        """Forget what only matters while the tape runs. What can still be reached has its memory again."""
        for cell in self._cells.values():
            self._restore(cell)
        self._cells.clear()
        self._params.clear()
        heap.trim()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what is done here is nobody's call
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in flat((args, kwargs)) if isinstance(value, Tensor)]
        cells = [self._cell_of(tensor) for tensor in tensors]
        written_tensors = _written_tensors(func, args, kwargs)
        overwritten = self._overwritten(func, tensors, cells)
        if self._grown > GROWTH_LIMIT:
            self._free(keep={cell for cell in cells if cell is not None})
        for tensor, cell in zip(tensors, cells, strict=True):
            if cell is not None and not cell.kept and tensor.untyped_storage().nbytes() < cell.nbytes:
                self._reallocate(tensor.untyped_storage(), cell, with_values=cell is not overwritten)
        record = self._note(func, args, kwargs, written_tensors, overwritten)
        out = func(*args, **kwargs)
        self._note_outputs(record, out, tensors)
        if not record.writes:
            return out
        self._number += 1
        unknown = func.overloadpacket.__name__ in _MOVES_MEMORY or func.namespace not in _OWN
        if unknown or any(cell.kept for cell in record.needs()):
            for cell in record.writes:
                cell.kept = True
        if overwritten is not None and not overwritten.was_read:
            overwritten.writes.clear()  # nobody will ever ask for what was there
        for cell in record.writes:
            cell.writes.append(record)
        for cell in record.needs():
            if record.writes != {cell}:
                cell.was_read = True
        return out

    def replay(self, target: Slice) -> Tensor:
        """The last values of ``target``, in new memory."""
        return target.on(_replay(target.cell, None))

    def _cell_of(self, tensor: Tensor) -> Cell | None:
        if not has_memory(tensor):
            return None
        with torch._C.DisableTorchFunction():
            return self._cells.get(tensor.untyped_storage()._cdata)

    def _note(
        self, func: Any, args: Any, kwargs: Any, written_tensors: list[Tensor], overwritten: Cell | None
    ) -> Record:
        """What is about to be done, before it changes what it reads."""
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
        """Cells for the memory that an operation made."""
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
        """Free the memory of all parameters but those that are in use."""
        self._grown = 0
        for param in self._params.values():
            cell = self._cell_of(param)
            if cell is None or cell in keep or cell.nbytes < SMALLEST_FREED:
                continue
            storage = param.untyped_storage()
            cell.kept = cell.kept or not storage.resizable()  # numpy has it
            if not cell.kept:
                storage.resize_(0)
        heap.trim()

    def _restore(self, cell: Cell) -> None:
        """Give ``cell`` its bytes back if anything still refers to its memory."""
        storage = cell.storage()
        if storage is not None and storage.nbytes() < cell.nbytes:
            self._reallocate(storage, cell, with_values=True)

    def _reallocate(self, storage: torch.UntypedStorage, cell: Cell, *, with_values: bool) -> None:
        storage.resize_(cell.nbytes)
        self._grown += cell.nbytes
        if with_values:
            _replay(cell, storage)


class _FunctionCalls(TorchFunctionMode):
    """Tells the tape of functions that it does not see."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS or name in _HANDS_OUT:
            for value in flat((args, kwargs)):
                if isinstance(value, Tensor):
                    self._tape.look(value, keep=name in _HANDS_OUT)
        return func(*args, **kwargs)


def _replay(target: Cell, into: torch.UntypedStorage | None) -> torch.UntypedStorage:
    """Do again what gave ``wanted`` its values, in a storage of their own, or in ``into``."""
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
        if value.cell not in storages:  # memory that was made empty, and is overwritten now
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
    """What has to be done again for the last values of ``wanted``, in order."""
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
