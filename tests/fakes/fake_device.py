"""A GPU made of CPU memory: work is done at once, and what was not waited for is found.

A real device runs behind the program, and a missing wait shows as a wrong bit, sometimes. Here every operation of
torch runs when it is called, so values are right, and written down is what each stream, each thread and each transfer
of NVMe touches, and what it knows to be over by then. Two that touch the same bytes, one of them writing, without one
knowing of the other's end, would on a real device do so in any order: that is a ``Conflict``, and leaving the block
raises it.

    with FakeDevice() as gpu:
        with gpu.streams.fetch.running():
            target.copy_(pinned, non_blocking=True)
        target.sum()  # found: compute did not wait for the copy

The device's memory is what is allocated for ``DEVICE`` (its index tells it from "cpu"), and what comes of operations on
that; everything else is the CPU's. An allocation counts as a write: what its stream did with the memory before need
not be over. Found are also device memory that is freed while another stream uses it and was not told to keep it, the
CPU or NVMe touching the device's memory, and operations that mix both. ``waits`` lists where the program made the CPU
wait for the device: for an event, by ``.item()``, by a copy that blocks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero3.device.tiers
import zero3.setup.assembly
from optim_cpu import kernels
from tests.fakes.gpu.host import Kernels, watch_threads, watch_transfers
from tests.fakes.gpu.memory import Kind, Region, Regions, address_of
from tests.fakes.gpu.operations import CROSSING, WAITING, Shape, place, shape_of, span_of, tensors_in, touched
from tests.fakes.gpu.order import Access, Agent, Clock, History, Place, knows, merge
from tests.fakes.gpu.streams import Answers, FakeStreams, at_once
from tiering.storage.arena import Arena
from zero3.device.pinning import PinnedMemory, refused

DEVICE = torch.device("cpu", 0)
PINNED_ARENAS = {"host"}
SHOWN = 6  # of what was found, in the message


class Conflict(NamedTuple):
    """Two accesses in any order, or one (``earlier`` None) that no real device would allow."""

    what: str
    later: str
    earlier: Access | None
    place: Place

    def __str__(self) -> str:
        lines = "".join(f"\n        {file}:{line} in {function}" for file, line, function in self.place)
        before = "" if self.earlier is None else f"\n    is not ordered behind the {self.earlier}"
        return f"{self.what}\n    {self.later}{lines}{before}"


class NotOrdered(AssertionError):  # noqa: N818 # it says what is wrong with a program, as an assertion does
    """What was found."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        more = f"\n... and {len(conflicts) - SHOWN} more" if len(conflicts) > SHOWN else ""
        super().__init__("\n".join(map(str, conflicts[:SHOWN])) + more)
        self.found = conflicts


class _Local(threading.local):
    """Of a thread."""

    moves = False  # whether it is in a ``to`` that crosses the link


class FakeDevice:
    """A device for the length of a block. ``answers``: what events say that nobody has waited for; or transfers.

    ``lockable``: bytes of host memory that the system allows to be pinned; None: any.
    """

    def __init__(
        self, answers: Answers = at_once, transfer_answers: Answers = at_once, *, lockable: int | None = None
    ) -> None:
        self.lockable = lockable
        self.locked: dict[int, int] = {}  # bytes, by address
        self.answers = answers
        self.transfer_answers = transfer_answers
        self.lock = threading.RLock()
        self.history = History()
        self.found: dict[Conflict, None] = {}
        self.waits: list[tuple[str, Place]] = []
        self.operations = 0  # on the device
        self.runs = 0  # of tasks
        self._threads = {threading.get_ident(): Agent("the CPU")}
        self.streams = FakeStreams(self)
        self._regions = Regions()
        self._storages: dict[int, Region] = {}  # an owning storage's address -> its memory
        self._kinds: dict[int, Kind] = {}  # of every storage that owned some, also while it is empty
        self._dead: deque[tuple[int, Clock]] = deque()
        self._local = _Local()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(kernels, "lib", Kernels(kernels.lib, self))
        watch_transfers(self, patch)
        watch_threads(self, patch)
        self._watch_memory(patch)
        self._stack.enter_context(self.watching())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self.check()

    def check(self) -> None:
        """NotOrdered if anything was found."""
        with self.lock:
            self._bury()
            if self.found:
                raise NotOrdered(list(self.found))

    def run_engines(self, patch: pytest.MonkeyPatch) -> None:
        """Engines that are made from now on take this for their GPU."""
        patch.setattr(zero3.setup.assembly, "chosen_device", lambda: DEVICE)
        patch.setattr(zero3.setup.assembly, "streams_of", lambda device: self.streams)
        patch.setattr(
            zero3.device.tiers, "pinned_memory", lambda _: PinnedMemory(self.register, self.unregister)
        )

    def register(self, address: int, nbytes: int) -> None:
        """As cudaHostRegister."""
        with self.lock:
            if self.lockable is not None and sum(self.locked.values()) + nbytes > self.lockable:
                raise RuntimeError(refused(nbytes, 2))
            self.locked[address] = nbytes
            whole = self._regions.at(address)
            if whole is None:  # an arena that is being mapped
                return
            begin, end = address, address + nbytes
            self._regions.remove(whole)
            for start, stop, kind in (
                (whole.start, begin, whole.kind),
                (begin, end, Kind.PINNED),
                (end, whole.end, whole.kind),
            ):
                if start < stop:
                    self._add(Region(start, stop, kind, whole.what))

    def unregister(self, address: int, device: torch.device) -> None:
        """As cudaHostUnregister."""
        del self.locked[address]

    def watching(self) -> AbstractContextManager[object]:
        """A block whose operations of torch, in this thread, are seen."""
        return _Mode(self)

    @property
    def host(self) -> Agent:
        """The calling thread."""
        return self.thread(threading.get_ident())

    def thread(self, ident: int) -> Agent:
        """A thread of Python; it need not know yet that it is one."""
        agent = self._threads.get(ident)
        return self._threads.setdefault(ident, Agent(f"thread {ident}")) if agent is None else agent

    def begin_thread(self, name: str) -> Agent:
        """The calling thread is a new one."""
        agent = self._threads[threading.get_ident()] = Agent(f"thread {name}")
        return agent

    def mistake(self, action: str) -> None:
        """Something that a real device does not do."""
        self.found[Conflict(action, "", None, place())] = None

    def wait(self, action: str) -> None:
        """The CPU waits, unasked, for what the calling thread has queued."""
        self.waits.append((action, place()))
        self.streams.compute.synchronize()

    def keep(self, tensor: Tensor, user: Agent) -> None:
        """As torch's record_stream, which knows of whole allocations of torch's alone."""
        with self.lock:
            region = self._storages.get(tensor.untyped_storage()._cdata)
            if region is not None:
                merge(region.kept, user.clock)

    def on_host(self, start: int, end: int, writes: bool, action: str) -> None:
        """The CPU touches [start, end)."""
        with self.lock:
            self._bury()
            region = self._regions.at(start)
            if region is None:
                return
            if region.kind is Kind.DEVICE:
                self.mistake(f"{action}: the CPU touches the device's memory ({region.what})")
                return
            host = self.host
            self.note(start, end, Access(host, host.tick(), writes, action, place()), host.clock)

    def on_device(self, start: int, end: int, writes: bool, action: str) -> None:
        """What the calling thread queues now touches [start, end)."""
        stream = self.streams.compute.agent
        stream.learn(self.host.clock)
        self.note(start, end, Access(stream, stream.tick(), writes, action, place()), stream.clock)

    def note(self, start: int, end: int, access: Access, clock: Clock) -> None:
        region = self._regions.at(start)
        if region is None:
            return
        if region.kind is Kind.DEVICE and " of NVMe" in access.what:
            self.mistake(f"{access.what}: NVMe reaches no device memory")
        for earlier in self.history.note(start, end, access, clock):
            later = f"{'write' if access.writes else 'read'} by {access.agent.name}: {access.what}"
            self.found[Conflict(f"{region.kind.value} memory", later, earlier, access.place)] = None

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch, and note what it touches."""
        shape = shape_of(operation)
        operands = list(touched(shape, args, kwargs))
        pinned = bool(kwargs.pop("pin_memory", False))
        with self.lock:
            self._bury()
            addresses = {tensor.untyped_storage()._cdata for tensor, _ in operands}
            regions = [self._regions.at(address_of(tensor)) for tensor, _ in operands]
            there = self._runs_there(shape, regions, kwargs)
            if there and shape.accesses and not self._crosses(shape, regions, args, kwargs):
                self._check_operands(shape, operands, regions)
        result = operation(*args, **kwargs)
        with self.lock:
            self._bury()
            results = [
                tensor
                for tensor in tensors_in(result)
                if tensor.untyped_storage()._cdata not in addresses and shape.makes
            ]
            kind = Kind.DEVICE if there else Kind.PINNED if pinned else Kind.PAGEABLE
            if self._crosses(shape, regions, args, kwargs):
                self._cross(shape, operands, results, regions, args, kwargs)
                return result
            for tensor in results:
                self._begin(tensor.untyped_storage(), kind, shape.name)
            if shape.accesses:
                touches = self.on_device if there else self.on_host
                self.operations += there
                for tensor, writes in (*operands, *((tensor, True) for tensor in results)):
                    touches(*span_of(tensor), writes, shape.name)
                if there and shape.name in WAITING:
                    self.wait(shape.name)
        return result

    def _runs_there(self, shape: Shape, regions: list[Region | None], kwargs: dict[str, Any]) -> bool:
        """Whether the device runs it: it has memory there, or is to make some."""
        if any(region is not None and region.kind is Kind.DEVICE for region in regions):
            return True
        return kwargs.get("device") == DEVICE

    def _crosses(
        self, shape: Shape, regions: list[Region | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether it is a copy between the CPU's memory and the device's."""
        if shape.name not in CROSSING or not regions:
            return False
        sides = [region is not None and region.kind is Kind.DEVICE for region in regions]
        if shape.name == "_to_copy":  # autograd's own have a device, too, which tells nothing
            return self._local.moves
        return len(sides) == 2 and sides[0] != sides[1]

    def _cross(
        self,
        shape: Shape,
        operands: list[tuple[Tensor, bool]],
        results: list[Tensor],
        regions: list[Region | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A copy over the link. Only between pinned memory and the device does the CPU go on meanwhile."""
        source = operands[-1][0]
        to_device = regions[-1] is None or regions[-1].kind is not Kind.DEVICE
        for tensor in results:
            self._begin(tensor.untyped_storage(), Kind.DEVICE if to_device else Kind.PAGEABLE, shape.name)
        target = results[0] if results else operands[0][0]
        here = self._regions.at((source if to_device else target).data_ptr())
        pinned = here is not None and here.kind is Kind.PINNED
        goes_on = pinned and bool(
            kwargs.get("non_blocking") or (shape.name == "copy_" and args[2:] == (True,))
        )
        self.operations += 1
        for tensor, writes in ((source, False), (target, True)):
            if pinned or writes is to_device:
                self.on_device(*span_of(tensor), writes, shape.name)
            elif to_device:  # the CPU puts it aside before the call returns
                self.on_host(*span_of(tensor), writes, shape.name)
        if not goes_on:
            self.wait(f"{shape.name} {'to' if to_device else 'from'} the device")
            if not pinned and not to_device:
                self.on_host(*span_of(target), True, shape.name)

    def _check_operands(
        self, shape: Shape, operands: list[tuple[Tensor, bool]], regions: list[Region | None]
    ) -> None:
        """Host memory in an operation of the device: the script's is taken for the device's, ours is a mistake."""
        for (tensor, _), region in zip(operands, regions, strict=True):
            if region is None or region.kind is Kind.DEVICE or tensor.dim() == 0:
                continue
            if region.movable:
                region.kind, region.owner = Kind.DEVICE, self.streams.compute.agent
            else:
                self.mistake(f"{shape.name} of the device uses {region.kind.value} memory ({region.what})")

    def _begin(self, storage: torch.UntypedStorage, kind: Kind, label: str) -> None:
        """``storage`` was given memory of its own."""
        key, start = storage._cdata, storage.data_ptr()
        if not storage.nbytes() or not start:
            return
        owner = self.streams.compute.agent if kind is Kind.DEVICE else None
        where = place()
        movable = kind is Kind.PAGEABLE and not (where and where[0][0].startswith(("zero3/", "tiering/")))
        region = Region(start, start + storage.nbytes(), kind, label, owner, movable)
        self._add(region)
        self._storages[key] = region
        self._follow(storage, kind)
        if owner is not None:  # which may still use what was there before
            self.on_device(region.start, region.end, True, f"{label}, which takes what was there before")

    def _follow(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        """Know of what kind ``storage`` is, whatever memory it has, as long as it lives."""
        key = storage._cdata
        if key not in self._kinds:
            weakref.finalize(storage, self._died, key).atexit = False
        self._kinds[key] = kind

    def _add(self, region: Region) -> None:
        self._regions.add(region)
        self.history.forget(region.start, region.end)

    def _is_there(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the device's, also while it has no memory."""
        with torch._C.DisableTorchFunctionSubclass():  # of a resharded parameter nobody else may ask that
            return self._has(address_of(tensor), tensor.untyped_storage()._cdata)

    def _has(self, address: int, key: int) -> bool:
        if not address:
            return self._kinds.get(key) is Kind.DEVICE
        region = self._regions.at(address)
        return region is not None and region.kind is Kind.DEVICE

    def _died(self, key: int) -> None:
        """A storage is no more. This may come in the middle of anything: what it means is looked at later."""
        clock: Clock = {}
        if (region := self._storages.get(key)) is not None and region.owner is not None:
            clock = self._clock_of(region.owner)
        self._dead.append((key, clock))

    def _clock_of(self, owner: Agent) -> Clock:
        """What ``owner`` knows to be over with what it is told next."""
        clock = dict(owner.clock)
        merge(clock, self.host.clock)
        return clock

    def _bury(self) -> None:
        while self._dead:
            key, clock = self._dead.popleft()
            self._kinds.pop(key, None)
            if (region := self._storages.pop(key, None)) is not None:
                self._end(region, clock)

    def _end(self, region: Region, clock: Clock) -> None:
        """Memory goes back to where ``region.owner`` takes its next from, at ``clock``."""
        if region.kind is Kind.DEVICE and region.owner is not None:
            for access in self.history.accesses(region.start, region.end):
                if not (access.agent is region.owner or knows(clock, access) or knows(region.kept, access)):
                    conflict = f"device memory ({region.what}) is freed without keep"
                    later = f"memory of {region.owner.name}"
                    self.found[Conflict(conflict, later, access, ())] = None
        self.history.forget(region.start, region.end)
        self._regions.remove(region)

    def _watch_memory(self, patch: pytest.MonkeyPatch) -> None:
        """Memory that comes and goes without an operation of torch, or is looked at."""
        map_arena = Arena.map.__func__  # type: ignore[attr-defined]
        storages = torch.UntypedStorage
        resize, exchange = storages.resize_, storages._swap_data_ptr_  # type: ignore[attr-defined]
        to, numpy, tolist = Tensor.to, Tensor.numpy, Tensor.tolist
        device = Tensor.device

        def mapped(cls: type[Arena], nbytes: int, name: str, *args: Any, **options: Any) -> Arena:
            arena: Arena = map_arena(cls, nbytes, name, *args, **options)
            if arena.capacity:
                asked = options.get("pin") is not None
                pinned = arena.address in self.locked if asked else name in PINNED_ARENAS
                kind = Kind.PINNED if pinned else Kind.PAGEABLE
                with self.lock:
                    self._add(Region(arena.address, arena.address + arena.capacity, kind, f"arena {name}"))
            return arena

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            with self.lock:
                self._bury()
                key = storage._cdata
                if key not in self._kinds:
                    return resize(storage, nbytes)
                if (region := self._storages.pop(key, None)) is not None:
                    self._end(region, {} if region.owner is None else self._clock_of(region.owner))
                result = resize(storage, nbytes)
                self._begin(storage, self._kinds[key], "resize_")
                return result

        def exchanged(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> Any:
            with self.lock:
                self._bury()
                both = storage, other
                there = any(self._has(address_of(each), each._cdata) for each in both)
                had = [self._storages.pop(each._cdata, None) for each in both]
                exchange(storage, other)
                for each, region in zip(both, reversed(had), strict=True):
                    self._follow(each, Kind.DEVICE if there else Kind.PAGEABLE)
                    if region is not None:
                        self._storages[each._cdata] = region

        def moved(tensor: Tensor, *args: Any, **options: Any) -> Any:
            """To torch both are one device: what crosses the link has to be copied, and what does not, not."""
            where, *rest = (options.pop("device"), *args) if "device" in options else args or (None,)
            if not isinstance(where, str | torch.device):
                return to(tensor, *args, **options)
            if self._is_there(tensor) is (torch.device(where) == DEVICE):
                return to(tensor, "cpu", *rest, **options)
            self._local.moves = True
            try:
                return to(tensor, "cpu", *rest, **options | {"copy": True})
            finally:
                self._local.moves = False

        def device_of(tensor: Tensor) -> torch.device:
            real: torch.device = device.__get__(tensor)
            return DEVICE if real.type == "cpu" and self._is_there(tensor) else real

        def as_numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
            for each in tensors_in(tensor):
                self.on_host(*span_of(each), False, "numpy")
            return numpy(tensor, *args, **options)

        def as_list(tensor: Tensor) -> Any:
            for each in tensors_in(tensor):
                if self._is_there(each):
                    with self.lock:
                        self.on_device(*span_of(each), False, "tolist")
                        self.wait("tolist")
                else:
                    self.on_host(*span_of(each), False, "tolist")
            return tolist(tensor)

        patch.setattr(Arena, "map", classmethod(mapped))
        patch.setattr(storages, "resize_", resized)
        patch.setattr(storages, "_swap_data_ptr_", exchanged)
        patch.setattr(Tensor, "device", property(device_of))
        patch.setattr(Tensor, "to", moved)
        patch.setattr(Tensor, "cpu", lambda tensor: moved(tensor, "cpu"))
        patch.setattr(Tensor, "numpy", as_numpy)
        patch.setattr(Tensor, "tolist", as_list)


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch loads its compiler for this, which takes seconds."""
        return False

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._device.operation(func, args, dict(kwargs or {}))
