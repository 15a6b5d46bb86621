"""Where the sidecar listens, what it takes from a client at most, and how it ends.

uvicorn serves; what it lacks is here: a limit of connections that lets new ones in, and deadlines for clients that
send or read too slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
AT_ONCE = 16  # connections accepted before the first of them is counted
QUEUED = 1024  # those that the system accepts for us meanwhile
LARGEST_HEAD = 16 << 10  # bytes of request line and headers
HEAD_SECONDS = 10.0  # for a request to arrive whole
READ_SECONDS = 30.0  # for a client to take what waits for it
IDLE_SECONDS = 30  # between requests: twice the interval at which Prometheus commonly asks
ANSWER_SECONDS = 0.5  # for requests under way when the end comes; streams have no end of their own
END_SECONDS = 1.8  # from the signal to the end, whatever hangs


class CannotListenError(Exception):
    """The place where the sidecar should listen cannot be had; the message says why, and what to do."""


@dataclass(frozen=True)
class Address:
    """An IP address and port to listen on."""

    family: socket.AddressFamily
    ip: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.ip).is_loopback


@dataclass(frozen=True)
class Place:
    """A socket that listens, and what clients call it. ``path`` and ``file`` are those of a Unix socket.

    As a context manager, it is closed and left in the end.
    """

    listener: socket.socket
    url: str
    path: Path | None = None
    file: os.stat_result | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.listener.close()

    def leave(self) -> None:
        """Remove what was made in the file system. Idempotent."""
        if self.path is not None and self.file is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(self.path.lstat(), self.file):
                    self.path.unlink()


def resolve(host: str, port: int) -> Address:
    """The address that ``host`` stands for: the first, where it has several."""
    if not 0 <= port <= 65535:  # getaddrinfo would quietly take it modulo 65536
        raise _no_listening(host, port, "a port is a number from 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise _no_listening(host, port, getattr(error, "strerror", None) or str(error)) from error
    return Address(family, str(address[0]), port)


def listen(address: Address) -> Place:
    """Listen there, on a free port where it names none."""
    try:
        listener = socket.create_server((address.ip, address.port), family=address.family, backlog=128)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "it is taken, perhaps by another tierd; choose another --port" if taken else error.strerror
        raise _no_listening(address.ip, address.port, why or str(error)) from error
    # Head and body of an answer are two writes, and without this the second waits for the client's delayed ACK. asyncio
    # sets it too, but not on what such a listener accepts.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host = f"[{address.ip}]" if address.family == socket.AF_INET6 else address.ip
    return Place(listener, f"http://{host}:{listener.getsockname()[1]}/")


def _no_listening(host: str, port: int, why: str) -> CannotListenError:
    return CannotListenError(f"cannot listen on {host} port {port}: {why}")


def listen_at(path: Path) -> Place:
    """Listen at a Unix socket that its owner alone may connect to; one that nobody listens at is replaced.

    Its directory must be ours: who may write there could put another socket in its place.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _make_way(path)
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(128)
            return Place(listener, f"unix:{path}", path, path.lstat())
    except OSError as error:
        listener.close()
        raise CannotListenError(f"cannot listen at {path}: {error.strerror or error}") from error
    except CannotListenError:
        listener.close()
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Of two that find the same dead socket, one replaces it and the other finds it alive."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CannotListenError(
                f"cannot listen at a socket in {directory}: others may write there; make a directory of your own"
                " for it (mkdir -m 700)"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_way(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise CannotListenError(f"cannot listen at {path}: a file of that name exists; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # its queue may be full, which is an answer too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise CannotListenError(
        f"cannot listen at {path}: it is taken, perhaps by another tierd; choose another --uds"
    )


def be_modest(niceness: int) -> None:
    """Step back behind training for the processor, and let connections run out before descriptors do."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """MAX_CONNECTIONS, or half of the descriptors that we may have: others are for files and who is not counted yet."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, most // 2)


def serve(app: ASGIApp, place: Place, greeting: str) -> None:
    """Answer at ``place`` until SIGINT or SIGTERM; ``greeting`` is printed once that is under way."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,  # problems go to standard error; uvicorn's own needs a standard output to start
        log_level="error",
        access_log=False,
        backlog=AT_ONCE,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, place)
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, server.end)
    signal.signal(signal.SIGALRM, server.give_up)
    _say(greeting)
    notify(b"READY=1")
    server.run(sockets=[place.listener])  # waits for its threads, too
    # Python's own end gives the alarm back its default, which is no end with 0.
    signal.setitimer(signal.ITIMER_REAL, 0)


def _say(greeting: str) -> None:
    try:
        print(greeting, flush=True)
    except OSError:  # nobody reads; nor will Python at exit, which would end with a status for that
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def notify(state: bytes) -> None:
    """Tell systemd, where it started us and wants to know (Type=notify)."""
    if where := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to, contextlib.suppress(OSError):
            to.sendto(state, "\0" + where[1:] if where.startswith("@") else where)


class _Server(uvicorn.Server):
    """Ends on its first signal within END_SECONDS, whatever clients and disks do."""

    def __init__(self, config: uvicorn.Config, place: Place) -> None:
        super().__init__(config)
        self._place = place

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are: they are ours since before the first client could know of us."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._place.listener.listen(QUEUED)  # asyncio knows one number for both

    def end(self, _signal: int, _frame: object) -> None:
        self.should_exit = True
        self._place.leave()
        notify(b"STOPPING=1")
        # Who has not been answered by then is cut off, and that is no error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        signal.setitimer(signal.ITIMER_REAL, END_SECONDS)

    def give_up(self, _signal: int, _frame: object) -> NoReturn:
        """A thread hangs, perhaps in a page on a disk that does not answer; Python would wait for it."""
        os._exit(0)


class _Deadline:
    """Cuts a connection off when it has run for ``seconds``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float) -> None:
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on, unless it runs already."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(H11Protocol):
    """A connection that neither dawdles nor crowds out others."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._most = most_connections()
        self._head = _Deadline(self.loop, transport, HEAD_SECONDS)
        self._reader = _Deadline(self.loop, transport, READ_SECONDS)
        self._head.start()
        if len(self.connections) > self._most:
            self._longest_idle().drop()

    def _longest_idle(self) -> _Connection:
        """Who makes room for this new one; itself, where all others are being answered."""
        ours = (one for one in self.connections if isinstance(one, _Connection))
        idle = (one for one in ours if one is not self and not one.busy)
        return min(idle, key=lambda one: one._idle_since, default=self)

    def drop(self) -> None:
        """Cut it off, and count it no more."""
        self.connections.discard(self)
        self.transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._head.stop()
        else:  # a part of the next request: uvicorn waits for the rest without an end
            self._head.start()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        self._reader.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._reader.stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # after a protocol error there is nothing left to say
            super().shutdown()
            self.loop.call_later(ANSWER_SECONDS, self.transport.abort)
