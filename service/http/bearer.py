"""The bearer token that clients must send: where it is read from, and which tokens are refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from service.formatting import counted

MIN_LENGTH = 16
MAX_LENGTH = 1024
VARIABLE = "TIERD_TOKEN"
HOW_TO_MAKE_ONE = (
    "make one (umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE)"
    " and start tierd with --token-file FILE"
)


class TokenError(Exception):
    """The token is missing or invalid, or other users can read its file. The message never contains the token."""


def load_token(file: Path | None, environment: Mapping[str, str]) -> bytes | None:
    """The token in ``file``, else the one in TIERD_TOKEN, else None. Raises TokenError."""
    if file is not None:
        return _checked(_read(file), f"token file {file}")
    if (value := environment.get(VARIABLE)) is not None:
        return _checked(os.fsencode(value), VARIABLE)
    return None


def _checked(raw: bytes, origin: str) -> bytes:
    token = raw.strip()
    if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise TokenError(
            f"{origin} has {counted(len(token), 'character')}; a token must have {MIN_LENGTH} to {MAX_LENGTH}:"
            f" {HOW_TO_MAKE_ONE}"
        )
    if not all(33 <= character <= 126 for character in token):
        raise TokenError(
            f"{origin} has a space or a character that is not allowed in a header: {HOW_TO_MAKE_ONE}"
        )
    return token


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenError(f"token file {file} cannot be read: {error.strerror}; {HOW_TO_MAKE_ONE}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenError(f"token file {file} is not a regular file; {HOW_TO_MAKE_ONE}")
        # Container platforms and systemd provide files that belong to root and that a group of this user can read.
        forbidden = 0o077 if status.st_uid == os.geteuid() else 0o037
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & forbidden:
            raise TokenError(
                f"token file {file} (mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}) can be read or"
                f" changed by other users; {HOW_TO_MAKE_ONE}"
            )
        return os.read(descriptor, MAX_LENGTH + 2)
    finally:
        os.close(descriptor)
