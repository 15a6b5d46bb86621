"""A connection to the tierd of a node. A node may be slow, of another version, or hostile: every answer is limited."""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from functools import cache

import h11

from service.nodes.addresses import Address

TIMEOUT = 4.0  # seconds for a whole request, including name resolution
MAX_HEAD = 16 << 10  # bytes of the status line and the headers
MAX_BODY = 4 << 20  # bytes of an answer, also after decompression: 240 ranks with their last 32 steps
MAX_PARALLEL = 16  # bodies that are received at the same time

# By the status of a response. The node's own text is not shown: it could contain the token.
_STATUSES = {
    401: "it requires another token; --of-token-file has the token of the nodes",
    404: "it has no /v1/readings: its tierd is older than this one",
    421: "it does not allow this host name; start it with --allow-host and the name",
    422: "it does not know this request: its tierd has another version",
    503: "its run directory cannot be read, or it has too many requests; its /healthz has the reason",
}


class NodeError(Exception):
    """A node has not answered, or not as expected. The message continues a sentence about the node."""


class Connection:
    """Requests to ``address``, one after the other, over a connection that stays open. Belongs to one event loop."""

    def __init__(self, address: Address, parallel: asyncio.Semaphore) -> None:
        self._address, self._parallel = address, parallel
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._protocol = h11.Connection(h11.CLIENT, MAX_HEAD)

    async def get(self, target: str) -> bytes:
        """The body of the response to GET ``target``. Raises NodeError; redirects are not followed."""
        try:
            async with asyncio.timeout(TIMEOUT):
                # The node may have closed the connection since the previous request.
                if self._stream is not None:
                    try:
                        return await self._exchange(target)
                    except (OSError, h11.RemoteProtocolError):
                        self.close()
                await self._connect()
                return await self._exchange(target)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | h11.RemoteProtocolError):
                raise NodeError(_reason(error)) from None
            raise

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._stream is not None:
            self._stream[1].transport.abort()
            self._stream = None

    async def _connect(self) -> None:
        context = _tls_context() if self._address.tls else None
        self._stream = await asyncio.open_connection(self._address.host, self._address.port, ssl=context)
        self._protocol = h11.Connection(h11.CLIENT, MAX_HEAD)

    async def _exchange(self, target: str) -> bytes:
        assert self._stream is not None
        _, writer = self._stream
        host = str(self._address).removeprefix("https://")
        headers = [("Host", host), ("Accept-Encoding", "gzip"), ("User-Agent", "tierd")]
        if self._address.token is not None:
            headers.append(("Authorization", f"Bearer {self._address.token.decode()}"))
        request = h11.Request(method="GET", target=target, headers=headers)
        writer.write((self._protocol.send(request) or b"") + (self._protocol.send(h11.EndOfMessage()) or b""))
        while not isinstance(head := await self._event(), h11.Response):
            pass
        if head.status_code != 200:
            raise NodeError(
                _STATUSES.get(head.status_code, f"it answered with the HTTP status {head.status_code}")
            )
        async with self._parallel:
            body = await self._body()
        if self._protocol.our_state is self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
        else:
            self.close()
        return _decompressed(body) if (b"content-encoding", b"gzip") in head.headers else body

    async def _event(self) -> h11.Event:
        """The next event. Raises RemoteProtocolError where no further event can follow."""
        assert self._stream is not None
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._stream[0].read(1 << 16))
        if isinstance(event, h11.Event) and not isinstance(event, h11.ConnectionClosed):
            return event
        raise h11.RemoteProtocolError("the connection is closed, or is no HTTP connection any more")

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise NodeError(f"its answer is larger than {MAX_BODY >> 20} MiB")
        return bytes(body)


def _decompressed(body: bytes) -> bytes:
    inflate = zlib.decompressobj(wbits=31)
    try:
        content = inflate.decompress(body, MAX_BODY + 1)
    except zlib.error:
        raise NodeError("its answer is not valid gzip") from None
    if len(content) > MAX_BODY:
        raise NodeError(f"its answer is larger than {MAX_BODY >> 20} MiB")
    if not inflate.eof:
        raise NodeError("its answer is not valid gzip")
    return content


@cache
def _tls_context() -> ssl.SSLContext:
    """The context of all connections: it takes 20 ms to load the certificates of the system."""
    return ssl.create_default_context()


def _reason(error: OSError | h11.RemoteProtocolError) -> str:
    """Why there is no answer."""
    if isinstance(error, h11.RemoteProtocolError):
        return "it does not speak HTTP, or closed the connection; is this the port of its tierd?"
    if isinstance(error, TimeoutError):
        return f"it has not answered within {TIMEOUT:g} s"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'unknown reason'}"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    # asyncio combines the errors of several addresses of a host in its own text.
    if isinstance(error, ConnectionRefusedError) or "refused" in str(error):
        return "the connection is refused: no tierd listens there"
    return f"the connection failed: {error.strerror or 'unknown reason'}"
