"""Processes that train together, as torchrun would have started them, and that live longer than one test.

Importing torch takes a process seconds: one server imports it once, and every rank is a fork of that. A test hands a
function to all ranks and gets back what each returned, raised, or died of; whoever hangs is made to dump its stacks.
The store that ranks meet at is served by the process of the tests, as torchrun's agent does it: it outlives any rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
LIMIT = 120.0  # seconds for a task; nothing here should take ten
GRACE = 20.0  # seconds that the others have left once a rank has failed
PRELOADED = ["pytest", "torch.distributed", "zero3.initialize", "tests.zero3.ranks.training"]


@dataclass(frozen=True)
class Raised:
    """An exception, in words: what carries tensors or engines is better left where it was raised."""

    kinds: tuple[str, ...]  # its class and the classes above
    message: str
    trace: str

    @property
    def kind(self) -> str:
        return self.kinds[0]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    """How a task went on one rank. Neither error nor exit code: it returned ``value``."""

    rank: int
    value: Any = None
    error: Raised | None = None
    exit_code: int | None = None  # the process is gone
    hung: bool = False  # it did not answer in time, and was ended
    seconds: float = 0.0
    log: str = ""  # what it wrote meanwhile, stacks of a hang included

    @property
    def fine(self) -> bool:
        return self.error is None and self.exit_code is None and not self.hung

    def report(self) -> str:
        if self.fine:
            return f"rank {self.rank} returned"
        state = f"ended with {self.exit_code}" if self.error is None else self.error.trace
        if self.hung:
            state = f"hung for {self.seconds:.0f} s"
        return f"---- rank {self.rank} {state}\n---- its log\n{self.log}"


class TaskError(AssertionError):
    """Not every rank returned from a task."""


class Pool:
    """``world_size`` processes. Usable as long as every task has returned on every rank; else it is ``broken``."""

    def __init__(self, world_size: int, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self.broken = False
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"rank{rank}.log" for rank in range(world_size)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[connection.Connection] = []
        self._processes: list[Any] = []
        context = nursery()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = _environment(rank, world_size, self._store.port) | dict(environment or {})
            process = context.Process(
                target=_serve, args=(rank, theirs, self._logs[rank], variables), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, **kwargs: Any) -> list[Any]:
        """What ``function(rank, *args, **kwargs)`` returned on each rank; it is pickled by name, args by value."""
        outcomes = self.outcomes(function, *args, limit=limit, **kwargs)
        if not all(outcome.fine for outcome in outcomes):
            raise TaskError("\n".join(["", *(outcome.report() for outcome in outcomes)]))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit: float = LIMIT,
        grace: float = GRACE,
        frozen: Sequence[int] = (),
        **kwargs: Any,
    ) -> list[Outcome]:
        """The same for tasks that some rank will not survive. ``frozen`` ranks are not waited for."""
        assert not self.broken, "this pool has lost a rank; take another"
        starts = [_size(log) for log in self._logs]
        task = pickle.dumps((function, args, kwargs))
        for link in self._connections:
            link.send_bytes(task)
        began = time.monotonic()
        deadline = began + limit
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size - len(frozen):
            waiting = [rank for rank in range(self.world_size) if rank not in outcomes and rank not in frozen]
            ready = connection.wait(
                [self._connections[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                outcomes |= {rank: self._abort(rank, time.monotonic() - began) for rank in waiting}
            for rank in waiting:
                if self._connections[rank] in ready:
                    outcomes[rank] = self._take(rank, time.monotonic() - began)
                    if not outcomes[rank].fine:
                        deadline = min(deadline, time.monotonic() + grace)
        for rank in frozen:
            outcomes[rank] = Outcome(rank, hung=True, seconds=time.monotonic() - began)
        self.broken = not all(outcome.fine for outcome in outcomes.values())
        return [
            Outcome(**{**vars(outcomes[rank]), "log": _read(self._logs[rank], starts[rank])})
            for rank in range(self.world_size)
        ]

    def close(self) -> None:
        """End every process: by itself if nothing went wrong, else at once."""
        if self.broken:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for link in self._connections:
            link.close()
        for process in self._processes:
            process.join(10)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            process.close()
        self._connections, self._processes = [], []

    def _take(self, rank: int, seconds: float) -> Outcome:
        try:
            value, error = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(10)
            return Outcome(rank, exit_code=self._processes[rank].exitcode, seconds=seconds)
        return Outcome(rank, value=value, error=error, seconds=seconds)

    def _abort(self, rank: int, seconds: float) -> Outcome:
        """SIGABRT writes all stacks to the log (faulthandler)."""
        process = self._processes[rank]
        os.kill(process.pid, signal.SIGABRT)
        process.join(5)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
        return Outcome(rank, exit_code=process.exitcode, hung=True, seconds=seconds)


class Pools:
    """One pool for each world size, made when it is asked for, and again when a test has broken it."""

    def __init__(self, logs: Path) -> None:
        self._logs = (logs / str(number) for number in itertools.count())
        self._pools: dict[int, Pool] = {}

    def of(self, world_size: int) -> Pool:
        pool = self._pools.get(world_size)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = self._pools[world_size] = self.fresh(world_size)
        return pool

    def fresh(self, world_size: int, environment: Mapping[str, str] | None = None) -> Pool:
        """A pool that the caller closes."""
        return Pool(world_size, next(self._logs), environment)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def nursery() -> Any:
    """The server that ranks are forks of; it is started once, and ends with this process."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # ranks import the functions of tests by their names
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _environ(
        OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))
    ):
        forkserver.ensure_running()
    return context


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process on a single node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
        "TIERING_DEVICE": "cpu",
    }


def _serve(rank: int, link: connection.Connection, log: Path, environment: Mapping[str, str]) -> None:
    """A rank: runs what it is told until its other end is closed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    gc.freeze()  # what the server imported: to look through it would copy it, too
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    while True:
        try:
            function, args, kwargs = pickle.loads(link.recv_bytes())
        except EOFError:
            break
        answer: tuple[Any, Raised | None]
        try:
            answer = function(rank, *args, **kwargs), None
        except BaseException as error:  # SystemExit, too: how a rank ends is the test's business
            answer = None, in_words(error)
        link.send_bytes(pickle.dumps(answer))
        del answer
    if dist.is_initialized():
        dist.destroy_process_group()


def in_words(error: BaseException) -> Raised:
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    return Raised(kinds, str(error), "".join(traceback.format_exception(error)))


@contextlib.contextmanager
def _environ(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _read(log: Path, start: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def all_ended(pids: Sequence[int], within: timedelta = timedelta(seconds=10)) -> bool:
    """Whether all of ``pids`` are gone."""
    deadline = time.monotonic() + within.total_seconds()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
