"""gzip for clients that accept it: of JSON, and of server-sent events."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from functools import cached_property

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MIN_SIZE = 1024  # bytes: a smaller body fits into one packet anyway
# The lowest level: it takes a tenth of the time of the rendering, and leaves a tenth of the bytes.
LEVEL = 1
# The start of a gzip stream without a name and a time.
STREAM_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def accepts_gzip(scope: Scope) -> bool:
    """Whether the client of the request in ``scope`` accepts gzip."""
    values = (value.decode("latin-1") for name, value in scope["headers"] if name == b"accept-encoding")
    return names_gzip(",".join(values))


def names_gzip(header: str) -> bool:
    """Whether the header Accept-Encoding names gzip, and does not exclude it."""
    for coding in header.split(","):
        name, *parameters = (part.strip().lower() for part in coding.split(";"))
        if name == "gzip":
            return quality(parameters) > 0
    return False


def quality(parameters: Iterable[str]) -> float:
    """The weight of an entry in an Accept header with these parameters; 0 if it is invalid."""
    value = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    return float(value) if re.fullmatch(r"[01](\.\d{0,3})?", value) else 0.0


class Body:
    """The body of a response. It is compressed once, when the first client accepts that."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.plain, LEVEL)


class JsonResponse(Response):
    """JSON, compressed if the client accepts it."""

    def __init__(self, body: Body, status_code: int = 200) -> None:
        super().__init__(body.plain, status_code, {"vary": "accept-encoding"}, "application/json")
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._body.plain) >= MIN_SIZE and accepts_gzip(scope):
            self.body = self._body.zipped
            self.headers["content-encoding"] = "gzip"
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def part_of_stream(content: bytes) -> bytes:
    """``content`` as a part of a gzip stream that begins with STREAM_HEAD and never ends.

    It refers to nothing before it, so that all clients get the same bytes, whatever part was their first.
    """
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(content) + deflate.flush(zlib.Z_SYNC_FLUSH)
