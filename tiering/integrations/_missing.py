"""The error if the library of a front end cannot be imported."""

from __future__ import annotations


def missing(front_end: str, library: str, extra: str, cause: Exception) -> ImportError:
    """The error of ``tiering.integrations.<front_end>``, which needs ``library``; ``extra`` of tiering installs it."""
    return ImportError(
        f"tiering.integrations.{front_end} needs {library}; install it with `pip install 'tiering[{extra}]'` ({cause})"
    )
