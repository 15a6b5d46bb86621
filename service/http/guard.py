"""Access control and rate limits: an ASGI middleware around the application.

The API is read-only, so only GET and HEAD are allowed. Web pages of other sites in the operator's browser get no data:
the guard checks headers that such a page cannot set, Host (against DNS rebinding) and Sec-Fetch-Site, and no response
allows another origin.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_TARGET = 2048  # bytes of path and query
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CLOSE = (b"connection", b"close")
HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


@dataclass(frozen=True)
class Access:
    """The clients that get a response, and how many requests per second.

    ``hosts`` are the names that a Host header may contain, in lower case; None allows all (for a Unix socket). An IP
    address is always allowed, because DNS rebinding needs a name. If there is a ``token``, every path with data
    requires it.
    """

    hosts: frozenset[str] | None = frozenset({"localhost"})
    token: bytes | None = field(default=None, repr=False)
    requests_per_second: float = 500.0


class Detail(BaseModel):
    """Why the request was refused, and a remedy."""

    detail: str


# For the schema: responses that the guard may send for any route.
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Detail, "description": description}
    for status, description in {
        400: "The request has no Host header, or several",
        401: "The token is missing or wrong",
        403: "The request comes from a web page of another site",
        413: "The request has a body",
        414: f"The path and query are longer than {MAX_TARGET} bytes",
        421: "The host name is not allowed",
        503: "Too many requests are waiting, or the run directory cannot be read",
    }.items()
}


@dataclass(frozen=True)
class Refusal:
    """A response of the guard itself."""

    status: int
    detail: str
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Send) -> None:
        body = json.dumps({"detail": self.detail}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class RateLimit:
    """Allows ``per_second`` requests in order of arrival; after a pause, ``burst`` of them without a delay."""

    def __init__(self, per_second: float, *, burst: int = 64, waiting: int = 1024) -> None:
        # The web page sends a dozen requests at once. A queue of 1024 is two seconds long at the default rate; a client
        # that waits longer tries again anyway.
        self._interval = 1.0 / per_second
        self._burst = burst * self._interval
        self.max_wait = waiting * self._interval
        self._next = -math.inf

    def reserve(self, now: float) -> float | None:
        """Seconds from ``now`` until the request may proceed; None if the queue is full."""
        turn = max(self._next, now - self._burst)
        if turn - now > self.max_wait:
            return None
        self._next = turn + self._interval
        return max(0.0, turn - now)


class Guard:
    """Passes the requests that ``access`` allows to ``app``, at a limited rate, and adds HEADERS to the responses.

    HEAD is allowed where GET is. Refused requests have a slower rate limit of their own, so clients without the token
    do not delay clients that have it. /livez also has its own, so a probe is answered under any load.
    """

    def __init__(self, app: ASGIApp, access: Access | None = None) -> None:
        self._app = app
        self._access = Access() if access is None else access
        rate = self._access.requests_per_second
        self._requests = RateLimit(rate)
        self._refusals, self._probes = RateLimit(rate / 5), RateLimit(rate / 5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        response = _Response(send, body=scope["method"] != "HEAD")
        refusal = refuse(scope, self._access)
        refusal = await self._wait(scope["path"], refusal) or refusal
        if refusal is not None:
            return await refusal.send(response.send)
        try:
            return await self._app({**scope, "method": "GET"}, receive, response.send)
        except Exception:
            if not response.started:
                await Refusal(
                    500, "internal error in the sidecar; its standard error has the traceback"
                ).send(response.send)
            raise

    async def _wait(self, path: str, refusal: Refusal | None) -> Refusal | None:
        limit = (
            self._refusals if refusal is not None else self._probes if path == "/livez" else self._requests
        )
        delay = limit.reserve(asyncio.get_running_loop().time())
        if delay is None:
            after = b"%d" % math.ceil(limit.max_wait)
            return Refusal(503, "too many requests are waiting; send fewer", ((b"retry-after", after),))
        if delay > 0:
            await asyncio.sleep(delay)
        return None


class _Response:
    """Sends a response: adds the headers of every response, and drops the body of a response to HEAD."""

    def __init__(self, send: Send, *, body: bool) -> None:
        self._send, self._body = send, body
        self.started = self._finished = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = list(message.get("headers", ()))
            if not any(name.lower() == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            await self._send({**message, "headers": headers + HEADERS})
        elif self._body:
            await self._send(message)
        elif not self._finished:
            # A response to HEAD has no body. It ends at once, so that the source of an endless stream stops.
            self._finished = True
            await self._send({"type": "http.response.body", "body": b""})


def refuse(scope: Scope, access: Access) -> Refusal | None:
    """The refusal of the request in ``scope``; None if it is allowed."""
    query = scope.get("query_string", b"")
    path = scope.get("raw_path") or scope["path"].encode()
    if len(path) + len(query) > MAX_TARGET:
        return Refusal(414, f"the path and query are longer than {MAX_TARGET} bytes")
    if scope["method"] not in ("GET", "HEAD"):
        # Such a request may have a body, which is not read.
        return Refusal(405, "this API is read-only: use GET or HEAD", ((b"allow", b"GET, HEAD"), CLOSE))
    if _header(scope, b"transfer-encoding") or any(
        length.strip(b"0 ") for length in _header(scope, b"content-length")
    ):
        return Refusal(413, "this API accepts no request body: send GET without one", (CLOSE,))
    return _wrong_host(_header(scope, b"host"), access.hosts) or _denied(scope, access)


def _header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _wrong_host(values: list[bytes], names: Iterable[str] | None) -> Refusal | None:
    if len(values) != 1:
        return Refusal(400, f"the request has {len(values)} Host headers: send one")
    if names is None:
        return None
    authority = values[0].decode("latin-1")
    host = host_of(authority)
    if host is None or not (_is_address(host) or host in names):
        return Refusal(
            421,
            f"the host name {authority[:100]!r} is not allowed: use the IP address or localhost,"
            " or start tierd with --allow-host and this name",
        )
    return None


def host_of(authority: str) -> str | None:
    """The host in ``authority``, in lower case: without the port, an IPv6 address without brackets; None if invalid."""
    host, colon, port = authority.strip().lower().partition(":")
    if host.startswith("["):
        host, bracket, suffix = authority.strip().lower()[1:].partition("]")
        colon, port = suffix[:1], suffix[1:]
        if not bracket or ":" not in host or colon not in ("", ":"):
            return None
    if colon and port and not (port.isascii() and port.isdigit()):
        return None
    return host.removesuffix(".") or None


def _is_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return getattr(address, "scope_id", None) is None  # the text after a "%" may be anything


def _denied(scope: Scope, access: Access) -> Refusal | None:
    path = scope["path"]
    if path in ("/", "/livez") or path.startswith("/page/"):
        return None  # no data
    if _is_cross_site(scope):
        return Refusal(403, "web pages of other sites get no data: open this address in its own tab")
    if access.token is not None and not _has_token(access.token, _header(scope, b"authorization")):
        return Refusal(
            401,
            "send the header 'Authorization: Bearer TOKEN' with the token that tierd was started with"
            " (TIERD_TOKEN or --token-file)",
            ((b"www-authenticate", b'Bearer realm="tierd"'),),
        )
    return None


def _is_cross_site(scope: Scope) -> bool:
    """Whether a web page of another site would get the response. It does not if a person only follows a link."""
    if all(site.lower() in (b"same-origin", b"none") for site in _header(scope, b"sec-fetch-site")):
        return False
    mode, dest = _header(scope, b"sec-fetch-mode"), _header(scope, b"sec-fetch-dest")
    return (mode, dest) != ([b"navigate"], [b"document"])


def _has_token(token: bytes, values: list[bytes]) -> bool:
    scheme, _, credentials = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), token)
