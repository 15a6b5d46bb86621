"""The server: where it listens, its limits for clients, and its shutdown.

uvicorn serves the requests. This module adds a limit of connections that still admits new clients, and deadlines for
clients that send or read too slowly.
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

from service.http.port_owner import listener_of

MAX_CONNECTIONS = 512
ACCEPTED_AT_ONCE = 16  # connections accepted before the first of them is counted
ACCEPT_QUEUE = 1024  # connections that the kernel accepts before the server does
MAX_HEAD = 16 << 10  # bytes of request line and headers
HEAD_SECONDS = 10.0  # for a client to send the whole request
READ_SECONDS = 30.0  # for a client to read what was sent
IDLE_SECONDS = 30  # between requests: twice Prometheus' usual scrape interval
DRAIN_SECONDS = 0.5  # for unfinished requests at shutdown; streams never finish by themselves
EXIT_SECONDS = 1.8  # from the signal to the exit, even if a thread hangs


class CannotListenError(Exception):
    """The sidecar cannot listen at the requested address. The message has the reason and the remedy."""


@dataclass(frozen=True)
class Address:
    """An IP address and port to listen on."""

    family: socket.AddressFamily
    ip: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return ipaddress.ip_address(self.ip).is_loopback


@dataclass(frozen=True)
class Listener:
    """A listening socket and its URL. ``path`` and ``file`` belong to a Unix socket.

    Leaving the context manager closes the socket and removes its file.
    """

    socket: socket.socket
    url: str
    path: Path | None = None
    file: os.stat_result | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unlink()
        self.socket.close()

    def unlink(self) -> None:
        """Remove the file of a Unix socket. Idempotent."""
        if self.path is not None and self.file is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(self.path.lstat(), self.file):
                    self.path.unlink()


def resolve(host: str, port: int) -> Address:
    """The first address of ``host``."""
    if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536 without an error
        raise _cannot_listen(host, port, "a port must be a number from 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, getattr(error, "strerror", None) or str(error)) from error
    return Address(family, str(address[0]), port)


def listen(address: Address) -> Listener:
    """Listen on ``address``; port 0 is any free port."""
    try:
        listener = socket.create_server((address.ip, address.port), family=address.family, backlog=128)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = (
            f"the port is in use {listener_of(address.port)}; choose another --port"
            if in_use
            else error.strerror
        )
        raise _cannot_listen(address.ip, address.port, reason or str(error)) from error
    # Head and body of a response are two writes; without TCP_NODELAY the second waits for the client's delayed ACK.
    # asyncio does not set the option on connections that this listener accepts.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host = f"[{address.ip}]" if address.family == socket.AF_INET6 else address.ip
    return Listener(listener, f"http://{host}:{listener.getsockname()[1]}/")


def _cannot_listen(host: str, port: int, reason: str) -> CannotListenError:
    return CannotListenError(f"cannot listen on {host} port {port}: {reason}")


def listen_at(path: Path) -> Listener:
    """Listen at a Unix socket that only its owner can connect to. A socket without a listener is replaced.

    The directory must belong to this user: other users who can write to it could replace the socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_dead_socket(path)
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(128)
            return Listener(listener, f"unix:{path}", path, path.lstat())
    except OSError as error:
        listener.close()
        raise CannotListenError(f"cannot listen at {path}: {error.strerror or error}") from error
    except CannotListenError:
        listener.close()
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory: of two sidecars that find the same dead socket, only one replaces it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CannotListenError(
                f"cannot listen at a socket in {directory}: other users can write to this directory; create your own"
                " (mkdir -m 700)"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead_socket(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise CannotListenError(
            f"cannot listen at {path}: the file exists and is not a socket; choose another --uds"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener whose queue is full would block
        try:
            # A socket whose queue is full has a listener.
            with contextlib.suppress(BlockingIOError):
                probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise CannotListenError(
        f"cannot listen at {path}: the socket is in use, perhaps by another tierd; choose another --uds"
    )


def lower_priority(niceness: int) -> None:
    """Give training priority for the CPU, and raise the limit of file descriptors above that of connections."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """MAX_CONNECTIONS, or half of the descriptor limit: files and uncounted connections need the other half."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, limit // 2)


def serve(app: ASGIApp, listener: Listener, greeting: str) -> None:
    """Serve ``app`` at ``listener`` until SIGINT or SIGTERM; print ``greeting`` when signals are handled."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,  # errors go to standard error; uvicorn's default config needs a standard output
        log_level="error",
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, listener)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.on_exit_signal)
    signal.signal(signal.SIGALRM, server.on_alarm)
    _print(greeting)
    notify(b"READY=1")
    server.run(sockets=[listener.socket])  # also waits for its threads
    # Python restores the default handler of SIGALRM at exit; the alarm would then end the process with a bad status.
    signal.setitimer(signal.ITIMER_REAL, 0)


def _print(greeting: str) -> None:
    try:
        print(greeting, flush=True)
    except OSError:
        # The reader of standard output has ended. Python's flush at exit would fail and set an exit status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def notify(state: bytes) -> None:
    """Send ``state`` to systemd if it expects that (Type=notify)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
            sender.sendto(state, "\0" + address[1:] if address.startswith("@") else address)


class _Server(uvicorn.Server):
    """Exits within EXIT_SECONDS of the first signal, even if clients or disks hang."""

    def __init__(self, config: uvicorn.Config, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep the handlers that ``serve()`` installed before the first client could connect."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.socket.listen(ACCEPT_QUEUE)  # asyncio has one parameter for both

    def on_exit_signal(self, _signal: int, _frame: object) -> None:
        self.should_exit = True
        self._listener.unlink()
        notify(b"STOPPING=1")
        # Requests that are not finished by then are dropped; this is not an error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)

    def on_alarm(self, _signal: int, _frame: object) -> NoReturn:
        """Exit now: a thread hangs, perhaps in a read from a disk, and Python would wait for it."""
        os._exit(0)


class _Deadline:
    """Aborts a connection ``seconds`` after ``start()``, unless stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float) -> None:
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer unless it runs already."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(H11Protocol):
    """A connection with deadlines, that gives way to new ones when there are too many."""

    # uvicorn narrows the type of the argument too: asyncio's protocol takes a BaseTransport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._max_connections = max_connections()
        self._head = _Deadline(self.loop, transport, HEAD_SECONDS)
        self._reader = _Deadline(self.loop, transport, READ_SECONDS)
        self._head.start()
        if len(self.connections) > self._max_connections:
            self._longest_idle().drop()

    def _longest_idle(self) -> _Connection:
        """The connection to drop for this new one; this one if all others have a request in progress."""
        connections = (connection for connection in self.connections if isinstance(connection, _Connection))
        idle = (connection for connection in connections if connection is not self and not connection.busy)
        return min(idle, key=lambda connection: connection._idle_since, default=self)

    def drop(self) -> None:
        """Abort the connection and stop counting it."""
        self.connections.discard(self)
        self.transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._head.stop()
        else:  # a part of the next request: uvicorn has no deadline for the rest
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
        if not self.transport.is_closing():  # a protocol error has closed it already
            super().shutdown()
            self.loop.call_later(DRAIN_SECONDS, self.transport.abort)
