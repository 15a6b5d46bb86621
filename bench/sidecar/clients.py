"""Those who ask: scrapers of /metrics and subscribers of /v1/events, each with a connection that it keeps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

HOST = "127.0.0.1"
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"  # as Prometheus asks
WARM_UP = 1.0  # seconds in which everybody connects and begins to ask, before anything counts
PATIENCE = 30.0  # seconds for an answer


@dataclass(slots=True)
class ClientLog:
    """What clients got in the time that counts: ``began`` to ``ended`` by the monotonic clock.

    ``latencies`` are seconds from a request to its whole answer; ``events`` has an entry per subscriber; ``errors``
    counts by what went wrong.
    """

    began: float = 0.0
    ended: float = float("inf")
    latencies: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    received: int = 0
    # No Counter: `asdict` copies one wrong.
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def note_error(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


async def ask(port: int, *, scrapers: int, subscribers: int, seconds: float, every: float) -> ClientLog:
    """Have them all ask for ``seconds``; each scraper once in ``every`` seconds, without a pause if that is 0."""
    log = ClientLog(events=[0] * subscribers)
    start = time.monotonic() + WARM_UP
    log.began, log.ended = start, start + seconds
    async with asyncio.TaskGroup() as clients:
        for number in range(scrapers):
            delay = number / scrapers * (every or WARM_UP / 2)
            clients.create_task(_scrape(port, log, delay, every))
        for number in range(subscribers):
            clients.create_task(_subscribe(port, log, number))
    log.errors.update({"a subscriber that heard nothing": log.events.count(0)} if 0 in log.events else {})
    return log


async def _scrape(port: int, log: ClientLog, delay: float, every: float) -> None:
    request = f"GET /metrics HTTP/1.1\r\nHost: {HOST}:{port}\r\nAccept: {ACCEPT}\r\n\r\n".encode()
    due = time.monotonic() + delay
    await asyncio.sleep(delay)
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            while due < log.ended:
                start = time.monotonic()
                writer.write(request)
                async with asyncio.timeout(PATIENCE):
                    status, size = await _answer(reader)
                now = time.monotonic()
                if log.began <= start and now <= log.ended:
                    log.latencies.append(now - start)
                    log.received += size
                if status != b"200":
                    log.note_error(f"/metrics answered {status.decode()}")
                due = max(due + every, now)  # a late answer moves what follows, and is not caught up with
                await asyncio.sleep(due - now)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
        log.note_error(f"/metrics: {type(error).__name__}")


async def _answer(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """Status and bytes of an answer whose length is told."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, separator, rest = head.partition(b"content-length:")
    if not separator:
        raise ValueError("an answer without its length")
    length = int(rest.split(maxsplit=1)[0])
    await reader.readexactly(length)
    return head.split(maxsplit=2)[1], length


async def _subscribe(port: int, log: ClientLog, number: int) -> None:
    """Events are counted by their first line; a cut in the middle of it is bridged."""
    mark = b"event: status"
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(f"GET /v1/events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            if (status := (await reader.readuntil(b"\r\n\r\n")).split(maxsplit=2)[1]) != b"200":
                log.note_error(f"/v1/events answered {status.decode()}")
                return
            rest = b""
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + log.ended - time.monotonic()):
                while more := await reader.read(1 << 16):
                    buffer = rest + more
                    if time.monotonic() >= log.began:
                        log.events[number] += buffer.count(mark)
                        log.received += len(more)
                    rest = buffer[-len(mark) + 1 :]
            log.note_error("/v1/events ended by itself")
        finally:
            writer.close()
    except TimeoutError:
        return  # the end of the time that counts
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        log.note_error(f"/v1/events: {type(error).__name__}")
