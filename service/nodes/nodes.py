"""Polls the tierds of all nodes in a thread, and keeps the last answer of each."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from service.formatting import counted, plain
from service.nodes.addresses import Address, AddressError, NodeList
from service.nodes.connection import MAX_PARALLEL, Connection, NodeError
from service.responses.readings import RankReading, Readings
from service.responses.status import SCHEMA_VERSION
from service.view import Node, Reading
from service.view import RankReading as ReadRank
from tiering.telemetry import RECENT_STEPS, StatusReading, as_text

# Seconds between two requests to a node, and at least so many for each node: with a viewer, a node with eight ranks
# takes up to 10 ms of a core.
INTERVAL, PER_NODE = 1.0, 0.08
# A node that has answered before is given up after so many failed requests: one may hit a restart.
FAILURES = 2
FIRST_READING = 4.5  # seconds in which each node answers, or has not answered
FILE_INTERVAL = 2.0  # seconds between two looks at the file of nodes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """A status file on another node."""

    run_name: str
    rank: int
    owner: str | None


class _Version(BaseModel):
    schema_version: int


@dataclass
class _State:
    """One node. The thread that polls sets the fields below ``address``; the lock of Nodes guards them."""

    address: Address
    ranks: tuple[RankReading, ...] = ()
    problem: str = "it has not answered yet"
    failures: int = 0
    answered_at: float | None = None

    @property
    def is_tried(self) -> bool:
        """Whether the first request has ended."""
        return self.failures > 0 or self.answered_at is not None


class Nodes:
    """The ranks on all nodes of ``nodes``: a source of a Watch.

    A thread sends each node a request per ``max_age`` seconds, whoever reads. Leaving the context manager ends it.
    """

    directory: Path | None = None

    def __init__(self, nodes: NodeList) -> None:
        self._nodes = nodes
        self.name = as_text(nodes.name)
        self._changed = threading.Condition()
        # Guarded by the lock of the condition.
        self._states = {address: _State(address) for address in nodes.addresses}
        self._loop = asyncio.new_event_loop()
        self._polling = self._loop.create_task(self._poll_all())
        # A thread that waits for a name server must not delay the exit.
        self._thread = threading.Thread(target=self._run, name="tierd-nodes", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._polling.cancel)
        self._thread.join()

    @property
    def max_age(self) -> float:
        """Seconds between two requests to a node."""
        return max(INTERVAL, PER_NODE * len(self._states))

    def read(self) -> Reading:
        """The last answers of all nodes. The first call waits until each node has answered or failed."""
        ranks: list[ReadRank] = []
        nodes, unreachable = [], {}
        with self._changed:
            self._changed.wait_for(
                lambda: all(state.is_tried for state in self._states.values()), FIRST_READING
            )
            states = [replace(state) for state in self._states.values()]
        now = time.time()
        for state in states:
            problem = f"{state.address} does not answer: {state.problem}" if state.problem else ""
            age = max(0.0, now - (state.answered_at or now)) if problem else 0.0
            for rank in state.ranks:
                if problem or rank.state == "unreachable":
                    unreachable[len(ranks)] = problem or rank.reason
                ranks.append(_reading(rank, age))
            nodes.append(Node(str(state.address), state.problem, state.answered_at, len(state.ranks)))
        return Reading(ranks, tuple(nodes), unreachable)

    def _run(self) -> None:
        # __exit__ cancels the polling.
        with closing(self._loop), suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._polling)

    async def _poll_all(self) -> None:
        """Poll the nodes of the list until cancelled, and follow its file."""
        parallel = asyncio.Semaphore(MAX_PARALLEL)
        tasks: dict[Address, asyncio.Task[None]] = {}
        try:
            while True:
                for address in tasks.keys() - self._states.keys():
                    tasks.pop(address).cancel()
                for place, (address, state) in enumerate(self._states.items()):
                    if address not in tasks:
                        # The requests to all nodes are spread over the interval.
                        delay = self.max_age * place / len(self._states)
                        tasks[address] = asyncio.create_task(self._poll(state, parallel, delay))
                await asyncio.sleep(FILE_INTERVAL)
                self._follow_file()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _follow_file(self) -> None:
        try:
            if not self._nodes.reread():
                return
        except AddressError as error:
            log.warning("%s", plain(f"{error}; the nodes stay as they were"))
            return
        with self._changed:
            self._states = {
                address: self._states.get(address) or _State(address) for address in self._nodes.addresses
            }

    async def _poll(self, state: _State, parallel: asyncio.Semaphore, delay: float) -> None:
        connection = Connection(state.address, parallel)
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + self.max_age + delay
                delay = 0.0
                await self._request(state, connection)
                await asyncio.sleep(due - loop.time())
        finally:
            connection.close()

    async def _request(self, state: _State, connection: Connection) -> None:
        """Replace the ranks of a node by its answer, or note why it does not answer."""
        problem, ranks = "", state.ranks
        try:
            ranks = await _ranks(state, connection)
        except NodeError as error:
            problem = str(error)
        except Exception:
            # A defect of this program must not end the polling of a node.
            log.exception("%s", plain(f"the answer of node {state.address} could not be used"))
            problem = "its answer could not be used; the log of this tierd has the error"
        with self._changed:
            state.failures = state.failures + 1 if problem else 0
            if not problem:
                state.ranks, state.problem, state.answered_at = ranks, "", time.time()
            elif state.problem or state.failures >= FAILURES:
                state.problem = problem
            self._changed.notify_all()


async def _ranks(state: _State, connection: Connection) -> tuple[RankReading, ...]:
    """The ranks of the node. Their descriptions do not change: they are requested when a rank is new."""
    known = {_key(rank): rank.description for rank in state.ranks}
    ranks = _parsed(await connection.get(_target(described=not known)), state.address)
    if known and not {_key(rank) for rank in ranks} <= known.keys():
        known, ranks = {}, _parsed(await connection.get(_target(described=True)), state.address)
    return tuple(
        rank.model_copy(update={"description": known[_key(rank)]}) if known else rank for rank in ranks
    )


def _key(rank: RankReading) -> tuple[str, str, int, float]:
    """The user, the run, the rank, and its start."""
    return rank.user, rank.run, rank.rank, 0.0 if rank.snapshot is None else rank.snapshot.started_at


def _target(described: bool) -> str:
    return "/v1/readings" if described else "/v1/readings?descriptions=false"


def _parsed(body: bytes, address: Address) -> list[RankReading]:
    """The ranks in an answer. Raises NodeError."""
    if address.token is not None and address.token in body:
        raise NodeError("its answer contains the token: it is no tierd")
    try:
        answer = Readings.model_validate_json(body)
    except ValidationError as error:
        # JSON without a version is no other version.
        with suppress(ValidationError):
            _check_version(_Version.model_validate_json(body))
        raise NodeError(f"its answer is not valid: {counted(error.error_count(), 'error')}") from None
    _check_version(answer)
    return answer.readings


def _check_version(answer: _Version | Readings) -> None:
    if (version := answer.schema_version) != SCHEMA_VERSION:
        older = "its" if version < SCHEMA_VERSION else "this"
        raise NodeError(
            f"its JSON has schema version {version}, and that of this tierd is {SCHEMA_VERSION}: update {older} tierd"
        )


def _reading(rank: RankReading, age: float) -> ReadRank:
    """The rank as a Watch reads it, ``age`` seconds after the answer of its node."""
    snapshot = rank.snapshot
    # The View tells a silent rank by its age.
    state = "live" if rank.state == "silent" or rank.state == "unreachable" else rank.state
    heartbeat_age = None if rank.heartbeat_age is None else rank.heartbeat_age + age
    if snapshot is not None and len(snapshot.steps) > RECENT_STEPS:
        snapshot = replace(snapshot, steps=snapshot.steps[-RECENT_STEPS:])
    reading = StatusReading(state, heartbeat_age, snapshot, rank.reason, rank.description, rank.published_at)
    return RemoteFile(rank.run, rank.rank, rank.user or None), reading
