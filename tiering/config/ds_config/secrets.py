"""What of a configuration is not shown to whoever looks at a run: passwords, tokens, keys of services."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|bearer|(api|access|account|auth|private|signing)_?key|apikey"
    r"|connection_?string|(^|_)(auth|pwd|jwt|cookies?|authorization)($|_)|(^|_)tokens?($|_)"
)
_COUNTED = re.compile(r"(^|_)tokens?($|_)")  # a number of tokens is no secret
_USER_IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/?#\s@]*@", re.IGNORECASE)


def without_secrets(key: str, value: Any) -> Any:
    """``value`` of the dotted ``key``, plain as JSON is, with what nobody else should know replaced by "(hidden)".

    That is what the names of a key say to be secret, those of sections inside ``value``, too, and an address with a
    user in it, who may be a token.
    """
    if value is None or value == "" or isinstance(value, bool):
        return value
    if any(_is_secret(_spelt(name), value) for name in key.split(".")):
        return HIDDEN
    if isinstance(value, Mapping):
        return {inner: without_secrets(str(inner), below) for inner, below in value.items()}
    if isinstance(value, list):
        return [without_secrets(key, each) for each in value]
    return HIDDEN if isinstance(value, str) and _USER_IN_URL.search(value) else value


def _spelt(name: str) -> str:
    """Its words in small letters, with "_" between them."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _is_secret(name: str, value: Any) -> bool:
    counts = isinstance(value, int | float) and _COUNTED.search(name)
    return not counts and _SECRET.search(name) is not None
