"""Tags: which names a checkpoint may have, and their order."""

from __future__ import annotations

import re

from tiering.errors import CheckpointError

LATEST = "latest"
"""The file that names the checkpoint to resume from."""

_DEFAULT = re.compile(r"global_step\d+", re.ASCII)
# Bytes. A replaced name has 19 more, and file systems allow 255.
_MAX_BYTES = 200


def check_tag(tag: str) -> None:
    """Raises CheckpointError if ``tag`` is not a valid name of a checkpoint."""
    if problem := tag_problem(tag):
        raise CheckpointError(
            f"invalid tag {tag[:80]!r}: it {problem}; a tag is a plain name such as 'global_step100'"
        )


def is_default_tag(tag: str) -> bool:
    """Whether ``tag`` is a default tag, such as "global_step100"."""
    return _DEFAULT.fullmatch(tag) is not None


def tag_problem(tag: str) -> str | None:
    """Why ``tag`` is invalid, or None."""
    if not tag:
        return "is empty"
    if tag == LATEST:
        return "is the name of the file that names the latest checkpoint"
    if tag.startswith("."):
        return "starts with a dot"
    if "/" in tag:
        return "is a path"
    # U+FFFD stands for bytes that are not UTF-8.
    if not tag.isprintable() or tag != tag.strip() or "\ufffd" in tag:
        return "has characters that are not printable"
    if len(tag.encode()) > _MAX_BYTES:
        return f"is longer than {_MAX_BYTES} bytes"
    return None


def numeric_order(name: str) -> list[tuple[int, str]]:
    """A sort key with numbers in numeric order: "step9" before "step10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
