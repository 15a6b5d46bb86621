"""The training text: the sources of Python's standard library, which each machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from tiering.errors import ConfigError


def standard_library() -> bytes:
    """The sources of the top-level modules of the standard library, in the order of their names.

    Raises :class:`ConfigError` if the interpreter comes without them.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    sources = sorted(directory.glob("*.py"))
    text = b"\n".join(source.read_bytes() for source in sources)
    if len(text) < 1 << 20:
        raise ConfigError(
            f"{directory} holds {len(text)} bytes of Python sources, too few to train on; use a Python "
            "that comes with its standard library as files"
        )
    return text


class Batches:
    """Random sequences of a text. Batch ``index`` depends only on ``seed``, so it is equal in all processes."""

    def __init__(self, text: bytes, *, size: int, sequence: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.size, self.sequence, self.seed = size, sequence, seed

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Bytes and their successors, both int64 [size, sequence]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        starts = torch.randint(len(self.text) - self.sequence, (self.size,), generator=generator)
        sequences = torch.stack(
            [self.text[start : start + self.sequence + 1] for start in starts.tolist()]
        ).long()
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
