"""Hides passwords, tokens and service keys in the configuration that a run publishes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|bearer|(api|access|account|auth|private|signing)_?key|apikey"
    r"|connection_?string|(^|_)(auth|pwd|jwt|cookies?|authorization)($|_)|(^|_)tokens?($|_)"
)
# A number of tokens is not a secret.
_TOKEN_COUNT = re.compile(r"(^|_)tokens?($|_)")
_USER_IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/?#\s@]*@", re.IGNORECASE)


def without_secrets(key: str, value: Any) -> Any:
    """The JSON ``value`` of the dotted ``key``, with every secret replaced by "(hidden)".

    A value is secret if a name in its path looks like one, including the names of sections inside ``value``, or if it
    is a URL with a user name, because that may be a token.
    """
    if value is None or value == "" or isinstance(value, bool):
        return value
    if any(_is_secret(_snake_case(name), value) for name in key.split(".")):
        return HIDDEN
    if isinstance(value, Mapping):
        return {inner: without_secrets(str(inner), below) for inner, below in value.items()}
    if isinstance(value, list):
        return [without_secrets(key, each) for each in value]
    return HIDDEN if isinstance(value, str) and _USER_IN_URL.search(value) else value


def _snake_case(name: str) -> str:
    """``name`` in snake case."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _is_secret(name: str, value: Any) -> bool:
    counts = isinstance(value, int | float) and _TOKEN_COUNT.search(name)
    return not counts and _SECRET.search(name) is not None
