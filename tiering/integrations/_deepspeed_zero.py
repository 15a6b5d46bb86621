"""The module ``deepspeed.zero`` of programs that import deepspeed: ``tiering.zero``, whose ``Init`` joins the ranks."""

from __future__ import annotations

from typing import Any, Self

import tiering
from tiering import zero

__all__ = ["Init"]


class Init(zero.Init):
    """As ``tiering.zero.Init``; in the context there is a process group, also of one process.

    Programs rely on the group that DeepSpeed makes: transformers loads weights on rank 0 alone.
    """

    def __enter__(self) -> Self:
        tiering.init_distributed(verbose=False)
        return super().__enter__()


def __getattr__(name: str) -> Any:
    return getattr(zero, name)


def __dir__() -> list[str]:
    return dir(zero)
