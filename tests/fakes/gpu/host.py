"""What the CPU does without torch: kernels called by address, transfers of NVMe, threads that tell each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

from optim_cpu import kernels
from optim_cpu.kernels import PreparedStep
from tiering.errors import SwapError
from tiering.storage.aio import AioContext
from tiering.storage.request import KIND_NAMES
from tiering.storage.tasks import Task
from tiering.storage.tickets import Ticket, Transfers
from zero3.checkpoint.saving import Saver
from zero3.optimizer.tiles import Tile

from .operations import place
from .order import Access, Agent, Clock, merge

if TYPE_CHECKING:
    from tests.fakes.fake_device import FakeDevice

SIZES = {int(kernels.DType.FP32): 4, int(kernels.DType.BF16): 2, int(kernels.DType.FP16): 2}


class Kernels:
    """The library of kernels, with what each of them reads and writes."""

    def __init__(self, library: Any, device: FakeDevice) -> None:
        self._library = library
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def opt_split(self, param: int, remainder: int, master: int, numel: int) -> int:
        self._notes("split", numel, reads=[(master, 4)], writes=[(param, 2), (remainder, 2)])
        return int(self._library.opt_split(param, remainder, master, numel))

    def opt_join(self, master: int, param: int, remainder: int, numel: int) -> int:
        self._notes("join", numel, reads=[(param, 2), (remainder, 2)], writes=[(master, 4)])
        return int(self._library.opt_join(master, param, remainder, numel))

    def opt_accumulate(self, dst: int, to: int, src: int, of: int, numel: int, overwrite: bool) -> int:
        self._notes("accumulate", numel, reads=[(src, SIZES[of])], writes=[(dst, SIZES[to])])
        return int(self._library.opt_accumulate(dst, to, src, of, numel, overwrite))

    def opt_reduce(
        self,
        dst: int,
        to: int,
        sources: list[int],
        count: int,
        of: int,
        numel: int,
        factor: float,
        over: bool,
    ) -> int:
        self._notes("reduce", numel, reads=[(s, SIZES[of]) for s in sources], writes=[(dst, SIZES[to])])
        return int(self._library.opt_reduce(dst, to, sources, count, of, numel, factor, over))

    def opt_sum_of_squares(self, address: int, of: int, numel: int, sum_: Any) -> int:
        self._notes("sum_of_squares", numel, reads=[(address, SIZES[of])], writes=[])
        return int(self._library.opt_sum_of_squares(address, of, numel, sum_))

    def opt_run(self, segments: Any, count: int, rules: Any, grad_scale: float) -> int:
        for index in range(count):
            s = segments[index]
            states = self._library.opt_state_count(rules + s.rule)
            itemsize = kernels.StateFormat(s.state_format).itemsize
            writes = [(s.param, 2 if s.remainder else 4), (s.remainder, 2), (s.out, SIZES[s.out_dtype])]
            writes += [(s.state[number], itemsize) for number in range(states)]
            self._notes("step", s.numel, reads=[(s.grad, SIZES[s.grad_dtype])], writes=writes)
        return int(self._library.opt_run(segments, count, rules, grad_scale))

    def _notes(
        self, kernel: str, numel: int, reads: list[tuple[Any, int]], writes: list[tuple[Any, int]]
    ) -> None:
        for ranges, written in ((reads, False), (writes, True)):
            for pointer, size in ranges:
                address = int(kernels.ffi.cast("intptr_t", pointer))
                if address and numel:
                    self._device.on_host(address, address + numel * size, written, f"kernel {kernel}")


class Transfer:
    """A transfer of NVMe: it uses its buffer from when it is asked for until somebody knows that it is over."""

    def __init__(self, device: FakeDevice, agent: Agent, start: int, end: int, access: Access) -> None:
        self._device = device
        self._agent = agent
        self._range = start, end
        self._access = access
        self._end: Clock = {}  # of those who came to know

    def known(self) -> bool:
        """Whether somebody has seen its end."""
        return bool(self._end)

    def ended(self) -> None:
        """The calling thread has seen its end."""
        host = self._device.host
        host.learn(self._end)
        if not self._end:
            host.learn(self._agent.clock)
            access = self._access._replace(agent=host, moment=host.tick())
            self._device.history.rename(*self._range, self._agent, access)
            self._end = {host.number: access.moment}


def watch_transfers(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """Note when each transfer begins, when somebody learns of its end, and that ``close`` ends all of them."""
    _watch_submissions(device, patch)
    _watch_tickets(device, patch)
    _watch_collections(device, patch)
    _watch_runs(device, patch)


def _end(device: FakeDevice, request: Any) -> None:
    """The calling thread has seen the end of ``request``; without bytes it is no transfer here."""
    if (transfer := getattr(request, "fake", None)) is not None:
        with device.lock:
            transfer.ended()


def _watch_submissions(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    submit, close = Transfers._submit, AioContext.close
    live: list[Transfer] = []

    def submitted(transfers: Transfers, request: Any) -> int:
        code, kind, buffer, nbytes = submit(transfers, request), request.kind, request.buffer, request.nbytes
        if code >= 0 and buffer is not None and nbytes:
            with device.lock:
                action = f"{KIND_NAMES[kind]} of NVMe, {', '.join(request.names)[:60]}"
                agent = Agent(f"a transfer ({action})")
                agent.learn(device.host.clock)
                for earlier in request.after:
                    if (before := getattr(earlier, "fake", None)) is not None:
                        agent.learn(before._agent.clock)
                start, end = buffer.address, buffer.address + nbytes
                access = Access(agent, agent.tick(), KIND_NAMES[kind] == "read", action, place())
                device.note(start, end, access, agent.clock)
                request.fake = transfer = Transfer(device, agent, start, end, access)
                live.append(transfer)
        return code

    def closed(context: AioContext) -> None:
        try:
            close(context)
        finally:
            with device.lock:
                for transfer in live:
                    transfer.ended()
                live.clear()

    patch.setattr(Transfers, "_submit", submitted)
    patch.setattr(AioContext, "close", closed)


def _watch_tickets(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """A caller asks one ticket for its end."""
    wait, done = Ticket.wait, Ticket.done

    def waited(ticket: Ticket, timeout: float | None = None) -> int:
        try:
            result = wait(ticket, timeout)
        except SwapError:
            _end(device, ticket._request)
            raise
        _end(device, ticket._request)
        return result

    def is_done(ticket: Ticket) -> bool:
        transfer: Transfer | None = getattr(ticket._request, "fake", None)
        if transfer is not None and not transfer.known() and not device.transfer_answers():
            return False
        over = done(ticket)
        if over:
            _end(device, ticket._request)
        return over

    patch.setattr(Ticket, "wait", waited)
    patch.setattr(Ticket, "done", is_done)


def _watch_collections(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """The context itself collects what has ended, of any ticket."""
    wait_any, succeed = Transfers.wait_any, Transfers._succeed

    def waited_any(transfers: Transfers, requests: Sequence[Any], timeout: float | None) -> int:
        place = wait_any(transfers, requests, timeout)
        _end(device, requests[place])
        return place

    def succeeded(transfers: Transfers, request: Any) -> None:
        # Also of requests that a later submission collects: their memory is free from here on.
        _end(device, request)
        succeed(transfers, request)

    patch.setattr(Transfers, "wait_any", waited_any)
    patch.setattr(Transfers, "_succeed", succeeded)


def _watch_runs(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """Tasks run one after the other, so that the calling thread knows of each transfer that a call needs."""

    def run(context: AioContext, tasks: Sequence[Task]) -> None:
        device.runs += 1
        for task in tasks:
            try:
                for ticket in task.waits:
                    ticket.wait()
            except SwapError:
                return
            assert isinstance(task.call, PreparedStep)
            step = task.call._step
            task.began = time.monotonic_ns()
            task.answer = kernels.lib.opt_run(step.segments, step.count, step.rules, step.grad_scale)
            task.ended = time.monotonic_ns()
            if task.answer:
                return
            for ticket in task.begins:
                ticket.begin()

    patch.setattr(AioContext, "run", run)


def watch_threads(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """A thread knows what the one that started it knew; who gets a lock, what those knew that have given it back."""
    start, join = threading.Thread.start, threading.Thread.join
    enter, leave, wait = (getattr(threading.Condition, name) for name in ("__enter__", "__exit__", "wait"))
    clocks: WeakKeyDictionary[threading.Condition, Clock] = WeakKeyDictionary()

    def tell(condition: threading.Condition) -> None:
        with device.lock:
            merge(clocks.setdefault(condition, {}), device.host.clock)

    def listen(condition: threading.Condition) -> None:
        with device.lock:
            device.host.learn(clocks.get(condition, {}))

    def started(thread: threading.Thread) -> None:
        run, clock = thread.run, dict(device.host.clock)

        def watched() -> None:
            device.begin_thread(thread.name).learn(clock)
            with device.watching():  # which is for each thread
                run()

        thread.run = watched  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive() and thread.ident is not None:
            device.host.learn(device.thread(thread.ident).clock)

    def entered(condition: threading.Condition) -> Any:
        result = enter(condition)
        listen(condition)
        return result

    def exited(condition: threading.Condition, *error: Any) -> Any:
        tell(condition)
        return leave(condition, *error)

    def waited(condition: threading.Condition, timeout: float | None = None) -> bool:
        tell(condition)
        try:
            return bool(wait(condition, timeout))
        finally:
            listen(condition)

    has_copied = Saver.has_copied

    def may_change(saver: Saver, tile: Tile) -> bool:
        """It looks without the lock, under which was written what it finds."""
        answer = has_copied(saver, tile)
        listen(saver._change)
        return answer

    patch.setattr(Saver, "has_copied", may_change)
    replacements: dict[str, Callable[..., Any]] = {"__enter__": entered, "__exit__": exited, "wait": waited}
    for name, replacement in replacements.items():
        patch.setattr(threading.Condition, name, replacement)
    patch.setattr(threading.Thread, "start", started)
    patch.setattr(threading.Thread, "join", joined)
