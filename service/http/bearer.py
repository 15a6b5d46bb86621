"""The token that clients must know: where an operator gives it, and what is refused as one."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from service.formatting import counted

SHORTEST = 16
LONGEST = 1024
VARIABLE = "TIERD_TOKEN"
HOW_TO_MAKE_ONE = (
    "make one (umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE)"
    " and start tierd with --token-file FILE"
)


class TokenError(Exception):
    """What was given is not a token, or others can read its file. The message never contains the token."""


def token_of(file: Path | None, environment: Mapping[str, str]) -> bytes | None:
    """The token in ``file``, else in TIERD_TOKEN; None where neither is given. Raises TokenError."""
    if file is not None:
        return _judged(_read(file), f"token file {file}")
    if (given := environment.get(VARIABLE)) is not None:
        return _judged(os.fsencode(given), VARIABLE)
    return None


def _judged(raw: bytes, origin: str) -> bytes:
    token = raw.strip()
    if not SHORTEST <= len(token) <= LONGEST:
        raise TokenError(
            f"{origin} holds {counted(len(token), 'character')}, a token has {SHORTEST} to {LONGEST}: {HOW_TO_MAKE_ONE}"
        )
    if not all(33 <= character <= 126 for character in token):
        raise TokenError(f"{origin} holds a space or a character that no header can carry: {HOW_TO_MAKE_ONE}")
    return token


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenError(f"token file {file} cannot be read: {error.strerror}; {HOW_TO_MAKE_ONE}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenError(f"token file {file} is no regular file; {HOW_TO_MAKE_ONE}")
        # Root's are what container platforms and systemd hand out, readable by a group of ours.
        forbidden = 0o077 if status.st_uid == os.geteuid() else 0o037
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & forbidden:
            raise TokenError(
                f"token file {file} (mode {stat.S_IMODE(status.st_mode):04o}, of user {status.st_uid}) is not ours"
                f" alone; {HOW_TO_MAKE_ONE}"
            )
        return os.read(descriptor, LONGEST + 2)
    finally:
        os.close(descriptor)
