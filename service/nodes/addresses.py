"""The nodes of ``tierd --of``: their addresses and tokens, from the command line or from a file."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from service.formatting import counted, plain
from service.http import DEFAULT_PORT
from service.http.bearer import OF_NODES, TokenError, read_token

MAX_NODES = 256
LARGEST_FILE = 256 << 10  # bytes


class AddressError(ValueError):
    """An address, a token file or the file of nodes is invalid. The message has no token."""


@dataclass(frozen=True)
class Address:
    """Where the tierd of a node listens, and the token that it requires."""

    host: str
    port: int
    tls: bool = False
    token: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https://' if self.tls else ''}{host}:{self.port}"

    @property
    def is_exposed(self) -> bool:
        """Whether the token crosses a network in clear text."""
        if self.tls or self.token is None or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def parse(text: str, token: bytes | None = None) -> Address:
    """The address in ``text``: HOST, HOST:PORT, or the same after http:// or https://. Raises AddressError."""
    shown = plain(text[:100])
    if "@" in text:
        raise AddressError("an address of a node has no user name or password; use a token file")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
        # The resolver refuses an empty or a long label in the same way.
        (host or "").encode("idna")
    except ValueError as error:
        raise AddressError(f"{shown!r} is not an address of a node: {error}") from error
    if (
        scheme not in ("http", "https")
        or not host
        or port == 0
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
    ):
        raise AddressError(f"{shown!r} is not an address of a node: HOST, HOST:PORT or https://HOST:PORT")
    if not (host.isascii() and host.isprintable()) or " " in host:
        raise AddressError(f"{shown!r} is not an address of a node: the host name is invalid")
    tls = scheme == "https"
    return Address(host, port or (443 if tls else DEFAULT_PORT), tls, token)


class NodeList:
    """The nodes in ``text``, separated by commas, or in ``file``, one per line. Raises AddressError.

    A line of the file has an address and, optionally, the token file of this node; "#" starts a comment. ``token`` is
    for nodes without a token file.
    """

    def __init__(self, text: str = "", *, file: Path | None = None, token: bytes | None = None) -> None:
        self._file, self._token = file, token
        self._version: object = None
        self.addresses: tuple[Address, ...] = ()
        if file is None:
            self.addresses = _distinct(parse(part, token) for part in text.split(",") if part)
        else:
            self.reread()

    @property
    def name(self) -> str:
        """The nodes in words."""
        if self._file is not None:
            return f"the nodes in {self._file}"
        names = [str(address) for address in self.addresses]
        return (
            "the nodes " + ", ".join(names)
            if len(names) <= 4
            else f"{counted(len(names), 'node')} from {names[0]} to {names[-1]}"
        )

    def reread(self) -> bool:
        """Read the file again if it has changed, and return whether it has. On an error, the nodes stay.

        An error is raised once, and again after the next change.
        """
        if self._file is None or (version := _version(self._file)) == self._version:
            return False
        # Before the content: the file may be invalid.
        self._version = version
        try:
            with self._file.open("rb") as opened:
                content = opened.read(LARGEST_FILE + 1)
        except OSError as error:
            raise AddressError(f"the file of nodes {self._file} cannot be read: {error.strerror}") from error
        if len(content) > LARGEST_FILE:
            raise AddressError(f"the file of nodes {self._file} is larger than {LARGEST_FILE >> 10} KiB")
        lines = content.decode("utf-8", "replace").splitlines()
        try:
            self.addresses = _distinct(
                self._line(words) for line in lines if (words := line.partition("#")[0].split())
            )
        except AddressError as error:
            raise AddressError(f"the file of nodes {self._file}: {error}") from error
        return True

    def _line(self, words: list[str]) -> Address:
        if len(words) > 2:
            raise AddressError("a line has an address and at most one token file")
        try:
            token = read_token(Path(words[1]), OF_NODES) if len(words) == 2 else self._token
        except TokenError as error:
            raise AddressError(str(error)) from error
        return parse(words[0], token)


def _version(file: Path) -> object:
    """A value that changes when ``file`` is written, replaced or removed, or gets another mode."""
    try:
        status = file.stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_ctime_ns


def _distinct(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses, each once. Raises AddressError if there are none or too many."""
    distinct = tuple({str(address): address for address in addresses}.values())
    if not distinct:
        raise AddressError("no node is named")
    if len(distinct) > MAX_NODES:
        raise AddressError(f"{len(distinct)} nodes are named; one tierd reads at most {MAX_NODES}")
    return distinct
