"""Who may ask, what, and how often: ASGI around everything that the application answers.

Nothing is ever written here, so only GET and HEAD exist. A page of somebody else's in the operator's browser is kept
out by what it cannot choose: the Host header (DNS rebinding), Sec-Fetch-Site, and that no answer allows another origin.
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

LONGEST_TARGET = 2048  # bytes of path and query
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
    """Who is let in, and how often. IP addresses are good hosts always: DNS rebinding needs a name.

    ``hosts`` are the names that a Host header may say, in lower case; None lets any pass (a Unix socket has none).
    With a ``token``, everything that holds data wants it.
    """

    hosts: frozenset[str] | None = frozenset({"localhost"})
    token: bytes | None = field(default=None, repr=False)
    requests_per_second: float = 500.0


class Detail(BaseModel):
    """Why there is no answer, and what to do about it."""

    detail: str


# For the schema: what any route may answer before it is asked.
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Detail, "description": description}
    for status, description in {
        400: "The request names no host, or several",
        401: "The token is missing or wrong",
        403: "The request comes from a page of another site",
        413: "The request has a body",
        414: f"The path and query are longer than {LONGEST_TARGET} bytes",
        421: "The host name is not one of this sidecar's",
        503: "Too many requests are waiting, or the run directory cannot be read",
    }.items()
}


@dataclass(frozen=True)
class Refusal:
    """An answer of the guard's own."""

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


class Pace:
    """Turns at ``per_second``, in the order in which they are asked for; after a rest, ``burst`` of them at once."""

    def __init__(self, per_second: float, *, burst: int = 64, waiting: int = 1024) -> None:
        # A page takes a dozen requests at once, and a queue of 1024 two seconds at the usual pace: who waits longer
        # asks again anyway.
        self._interval = 1.0 / per_second
        self._burst = burst * self._interval
        self.longest = waiting * self._interval
        self._next = -math.inf

    def reserve(self, now: float) -> float | None:
        """Seconds from ``now`` to one's turn; None where as many wait as may."""
        turn = max(self._next, now - self._burst)
        if turn - now > self.longest:
            return None
        self._next = turn + self._interval
        return max(0.0, turn - now)


class Guard:
    """Lets requests through to ``app`` as ``access`` says, each at its turn, and its answers out with HEADERS.

    HEAD is answered wherever GET is. Those refused wait in a slower lane of their own, so that whoever has no token
    does not hold up who has; and so does /livez, that a probe finds the sidecar alive however busy it is.
    """

    def __init__(self, app: ASGIApp, access: Access | None = None) -> None:
        self._app = app
        self._access = Access() if access is None else access
        rate = self._access.requests_per_second
        self._asked, self._refused, self._probed = Pace(rate), Pace(rate / 5), Pace(rate / 5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        answer = _Answer(send, body=scope["method"] != "HEAD")
        refusal = refuse(scope, self._access)
        refusal = await self._turn(scope["path"], refusal) or refusal
        if refusal is not None:
            return await refusal.send(answer.send)
        try:
            return await self._app({**scope, "method": "GET"}, receive, answer.send)
        except Exception:
            if not answer.started:
                await Refusal(500, "the sidecar failed to answer; what it prints says why").send(answer.send)
            raise

    async def _turn(self, path: str, refusal: Refusal | None) -> Refusal | None:
        lane = self._refused if refusal is not None else self._probed if path == "/livez" else self._asked
        wait = lane.reserve(asyncio.get_running_loop().time())
        if wait is None:
            after = b"%d" % math.ceil(lane.longest)
            return Refusal(
                503, "too many requests wait for their turn; ask less often", ((b"retry-after", after),)
            )
        if wait > 0:
            await asyncio.sleep(wait)
        return None


class _Answer:
    """The way out: adds what every answer carries, and drops the body of an answer to HEAD."""

    def __init__(self, send: Send, *, body: bool) -> None:
        self._send, self._body = send, body
        self.started = self._over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            said = list(message.get("headers", ()))
            if not any(name.lower() == b"cache-control" for name, _ in said):
                said.append((b"cache-control", b"no-store"))
            await self._send({**message, "headers": said + HEADERS})
        elif self._body:
            await self._send(message)
        elif not self._over:  # complete at once: whoever streams without an end learns that nobody listens
            self._over = True
            await self._send({"type": "http.response.body", "body": b""})


def refuse(scope: Scope, access: Access) -> Refusal | None:
    """Why the request of ``scope`` gets no answer; None where it does."""
    query = scope.get("query_string", b"")
    path = scope.get("raw_path") or scope["path"].encode()
    if len(path) + len(query) > LONGEST_TARGET:
        return Refusal(414, f"a path with its query takes at most {LONGEST_TARGET} bytes here")
    if scope["method"] not in ("GET", "HEAD"):
        # What comes after the head of such a request is not waited for.
        return Refusal(
            405, "nothing can be changed here: ask with GET or HEAD", ((b"allow", b"GET, HEAD"), CLOSE)
        )
    if _of(scope, b"transfer-encoding") or any(
        length.strip(b"0 ") for length in _of(scope, b"content-length")
    ):
        return Refusal(413, "a request has no body here: ask with GET alone", (CLOSE,))
    return _wrong_host(_of(scope, b"host"), access.hosts) or _not_for(scope, access)


def _of(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == wanted]


def _wrong_host(said: list[bytes], names: Iterable[str] | None) -> Refusal | None:
    if len(said) != 1:
        return Refusal(400, f"a request names one host, this one {len(said)}: send one Host header")
    if names is None:
        return None
    host = host_of(said[0].decode("latin-1"))
    if host is None or not (_is_address(host) or host in names):
        shown = said[0].decode("latin-1")[:100]
        return Refusal(
            421,
            f"this sidecar is not known as {shown!r}: ask by its IP address or localhost,"
            " or start tierd with --allow-host and that name",
        )
    return None


def host_of(authority: str) -> str | None:
    """``authority`` without its port, and an IPv6 address without its brackets, in lower case; None for neither."""
    host, colon, port = authority.strip().lower().partition(":")
    if host.startswith("["):
        host, bracket, rest = authority.strip().lower()[1:].partition("]")
        colon, port = rest[:1], rest[1:]
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
    return getattr(address, "scope_id", None) is None  # what follows a "%" may be anything


def _not_for(scope: Scope, access: Access) -> Refusal | None:
    path = scope["path"]
    if path in ("/", "/livez") or path.startswith("/page/"):
        return None  # no data
    if _for_another_site(scope):
        return Refusal(403, "pages of other sites get no data: open this address in a tab of its own")
    if access.token is not None and not _knows(access.token, _of(scope, b"authorization")):
        return Refusal(
            401,
            "send the header 'Authorization: Bearer TOKEN' with the token that tierd was started with"
            " (TIERD_TOKEN or --token-file)",
            ((b"www-authenticate", b'Bearer realm="tierd"'),),
        )
    return None


def _for_another_site(scope: Scope) -> bool:
    """Whether a page of another site would get the answer. It does not where a person follows its link to here."""
    if all(site.lower() in (b"same-origin", b"none") for site in _of(scope, b"sec-fetch-site")):
        return False
    follows = (_of(scope, b"sec-fetch-mode"), _of(scope, b"sec-fetch-dest")) == ([b"navigate"], [b"document"])
    return not follows


def _knows(token: bytes, said: list[bytes]) -> bool:
    scheme, _, given = said[0].partition(b" ") if len(said) == 1 else (b"", b"", b"")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)
