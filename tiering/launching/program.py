"""The program that each rank runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A script with its ``arguments``: run by Python, as a module, or itself if it ``is_executable``.

    With ``passes_local_rank`` each rank gets ``--local_rank=N`` as its first argument.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool = False
    is_executable: bool = False
    passes_local_rank: bool = True

    def command(self) -> list[str]:
        """The command line of a rank, without ``--local_rank``."""
        return [*self._start(), *self.arguments]

    def for_torchrun(self) -> list[str]:
        """What follows the options of torchrun."""
        if not self.passes_local_rank:
            mode = ["--no-python"] if self.is_executable else ["--module"] if self.is_module else []
            return [*mode, self.script, *self.arguments]
        # torchrun gives all ranks the same arguments. The shell is replaced by the rank's process.
        parts = ["exec", shlex.join(self._start()), '--local_rank="$LOCAL_RANK"', shlex.join(self.arguments)]
        return ["--no-python", "sh", "-c", " ".join(filter(None, parts))]

    def _start(self) -> list[str]:
        if self.is_executable:
            return [self.script]
        return [sys.executable, "-u", *(["-m"] if self.is_module else []), self.script]
