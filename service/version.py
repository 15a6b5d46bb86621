"""The version of the sidecar."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    """The version of the installed package; "unknown" in a source tree that was never installed."""
    try:
        return version("tiering")
    except PackageNotFoundError:
        return "unknown"
