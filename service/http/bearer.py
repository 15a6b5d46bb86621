"""Bearer tokens, which clients must send or the nodes require: where one is read from, and which are refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.formatting import counted

MIN_LENGTH = 16
MAX_LENGTH = 1024


@dataclass(frozen=True)
class Purpose:
    """Who requires a token: the variable of the environment that may have it, and the remedy for an invalid one."""

    variable: str
    remedy: str


OF_CLIENTS = Purpose(
    "TIERD_TOKEN",
    "make one (umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE)"
    " and start tierd with --token-file FILE",
)
OF_NODES = Purpose(
    "TIERD_OF_TOKEN", "write the token that the nodes require to a file of mode 0600, and name this file"
)


class TokenError(Exception):
    """The token is missing or invalid, or other users can read its file. The message never contains the token."""


def load_token(file: Path | None, environment: Mapping[str, str], purpose: Purpose) -> bytes | None:
    """The token in ``file``, else the one in the variable, else None. Raises TokenError."""
    if file is not None:
        return read_token(file, purpose)
    if (value := environment.get(purpose.variable)) is not None:
        return _checked(os.fsencode(value), purpose.variable, purpose.remedy)
    return None


def read_token(file: Path, purpose: Purpose) -> bytes:
    """The token in ``file``. Raises TokenError."""
    return _checked(_read(file, purpose.remedy), f"token file {file}", purpose.remedy)


def _checked(raw: bytes, origin: str, remedy: str) -> bytes:
    token = raw.strip()
    if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise TokenError(
            f"{origin} has {counted(len(token), 'character')}; a token must have {MIN_LENGTH} to {MAX_LENGTH}:"
            f" {remedy}"
        )
    if not all(33 <= character <= 126 for character in token):
        raise TokenError(f"{origin} has a space or a character that is not allowed in a header: {remedy}")
    return token


def _read(file: Path, remedy: str) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenError(f"token file {file} cannot be read: {error.strerror}; {remedy}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenError(f"token file {file} is not a regular file; {remedy}")
        # Container platforms and systemd provide files that belong to root and that a group of this user can read.
        forbidden = 0o077 if status.st_uid == os.geteuid() else 0o037
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & forbidden:
            raise TokenError(
                f"token file {file} (mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}) can be read or"
                f" changed by other users; {remedy}"
            )
        return os.read(descriptor, MAX_LENGTH + 2)
    finally:
        os.close(descriptor)
