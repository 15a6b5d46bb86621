"""Server-sent events: what subscribers are told, when, and that none of them holds up another."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.events import MAX_SUBSCRIBERS, Events, Subscription
from service.responses.examples import example
from service.status_files import StatusFiles
from service.view_cache import ViewCache
from service.watch import Watch

from .conftest import Publish
from .processes import Sidecar, until

SAID = example().runs[0].ranks[0].snapshot
assert SAID is not None


class Client:
    """The other end of an ASGI connection. ``stuck`` takes the head and then nothing; ``zipped`` accepts gzip."""

    def __init__(self, *, stuck: bool = False, zipped: bool = False) -> None:
        self.accepted = [(b"accept-encoding", b"br, gzip")] if zipped else []
        self._inflate = zlib.decompressobj(wbits=31) if zipped else None
        self.events: list[bytes] = []
        self.status = 0
        self._untold: asyncio.Queue[bytes] = asyncio.Queue()
        self._stuck = stuck
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.head = dict(message["headers"])
            return
        if self._stuck:
            await asyncio.sleep(3600)
        body = self._inflate.decompress(message["body"]) if self._inflate else message["body"]
        if body:  # the head of a gzip stream is empty
            self.events.append(body)
            self._untold.put_nowait(body)

    async def next(self) -> bytes:
        return await asyncio.wait_for(self._untold.get(), 20)

    async def news(self) -> tuple[str, Any]:
        """The name and data of the next event that is no comment."""
        while (event := await self.next()).startswith(b":"):
            pass
        name, data = event.decode().removesuffix("\n\n").split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def subscribe(self, events: Events, run: str | None = None) -> asyncio.Task[None]:
        scope = {"type": "http", "headers": self.accepted}
        listening = Subscription(events, 0.01, run)(scope, self.receive, self.send)
        return asyncio.ensure_future(listening)


def played(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.fixture
def rendered() -> list[int]:
    """The readings of which an event was made."""
    return []


@pytest.fixture
def events(directory: Path, rendered: list[int]) -> Events:
    def render(view: Any, run_id: str | None) -> bytes:
        rendered.append(view.readings)
        runs = [run for run in view.runs if run_id in (None, run.id)]
        return json.dumps({"steps": [snapshot.step for run in runs for snapshot in run.snapshots]}).encode()

    return Events(Watch(StatusFiles(directory), max_age=0.001), ViewCache(), render, keepalive_seconds=0.05)


def test_a_subscriber_is_told_at_once_and_then_what_is_new(
    events: Events, directory: Path, publishing: Publish
) -> None:
    writer = publishing(directory, SAID)

    async def scene() -> None:
        client = Client()
        listening = client.subscribe(events)
        assert await client.news() == ("status", {"steps": [SAID.step]})
        assert (client.status, client.head[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
        assert b"content-length" not in client.head
        assert await client.next() == b": nothing new\n\n"
        writer.publish(replace(SAID, step=77))
        assert await client.news() == ("status", {"steps": [77]})
        directory.chmod(0o777)
        name, problem = await client.news()
        assert name == "problem"
        assert "is open to others" in problem["detail"]
        directory.chmod(0o700)
        assert await client.news() == ("status", {"steps": [77]})
        zipped = Client(zipped=True)
        unzipping = zipped.subscribe(events)
        assert await zipped.news() == ("status", {"steps": [77]})
        assert zipped.head[b"content-encoding"] == b"gzip"
        assert await zipped.next() == b": nothing new\n\n"
        writer.publish(replace(SAID, step=78))
        assert await zipped.news() == ("status", {"steps": [78]})
        zipped.leave()
        await asyncio.wait_for(unzipping, 20)
        for run, steps in ((SAID.run_id, [78]), ("one-that-was-swept", [])):
            picky = Client()
            picky.subscribe(events, run)
            assert await picky.news() == ("status", {"steps": steps})
            picky.leave()
        while events.subscribers > 1:
            await asyncio.sleep(0.01)
        client.leave()
        await asyncio.wait_for(listening, 20)
        assert events.subscribers == 0

    played(scene)


def test_all_are_told_the_same_bytes_and_none_waits_for_another(
    events: Events, rendered: list[int], directory: Path, publishing: Publish
) -> None:
    writer = publishing(directory, SAID)

    async def scene() -> None:
        stuck = Client(stuck=True).subscribe(events)
        clients = [Client() for _ in range(20)]
        listening = [client.subscribe(events) for client in clients]
        for step in range(5):
            writer.publish(replace(SAID, step=step))
            await asyncio.gather(*(client.news() for client in clients))
            await asyncio.sleep(0.06)  # heartbeats closer than that are one
        assert not stuck.done()
        assert len(rendered) == len(set(rendered)), "one reading, one event"
        received = [event for client in clients for event in client.events if event.startswith(b"event")]
        assert len(received) > len({id(event) for event in received}) * 10, "made once for all who listen"
        for task in (stuck, *listening):
            task.cancel()

    played(scene)


def step_of(stream: http.client.HTTPResponse) -> int:
    """Of the run in the next event."""
    name, data, end = (stream.readline() for _ in range(3))
    assert (name, end) == (b"event: status\n", b"\n")
    return json.loads(data.removeprefix(b"data: "))["runs"][0]["step"]


def test_a_real_stream_moves_and_ends_with_its_client(
    sidecar: Sidecar, directory: Path, publishing: Publish
) -> None:
    """As many as there may be listen; one more is told when to come again, and comes when another leaves."""
    writer = publishing(directory, SAID)
    # What is published is seen at the next look at the directory, and the page may be open before its first figures.
    until(lambda: [run["step"] for run in sidecar.get("/v1/status")["runs"]] == [SAID.step])
    host = sidecar.url.removeprefix("http://")
    connections = [http.client.HTTPConnection(host, timeout=20) for _ in range(MAX_SUBSCRIBERS)]
    streams = []
    for connection in connections:
        connection.request("GET", "/v1/events?interval=0.25")
        streams.append(connection.getresponse())
    steps = [(stream.status, step_of(stream)) for stream in streams]
    assert steps == MAX_SUBSCRIBERS * [(200, SAID.step)]
    writer.publish(replace(SAID, step=77))
    until(lambda: step_of(streams[0]) == 77)
    with pytest.raises(urllib.error.HTTPError) as refused:
        sidecar.get("/v1/events")
    assert (refused.value.code, refused.value.headers["retry-after"]) == (503, "10")
    assert "too many subscribers" in refused.value.read().decode()

    def subscribers() -> int:
        return sidecar.get("/healthz")["subscribers"]

    assert subscribers() == MAX_SUBSCRIBERS
    for stream, connection in zip(streams, connections, strict=True):
        stream.close()
        connection.close()
    until(lambda: subscribers() == 0)
    assert sidecar.process.poll() is None
