"""torchrun as a user starts it, on one node or on several; and a rank by itself, as a batch system starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .training import Trained

SCRIPT = Path(__file__).with_name("script.py")
LIMIT = 180  # seconds, on a machine that does other things, too


class Node:
    """One agent with its ranks, in a session of its own; ``job`` is what script.py is told.

    With ``arguments`` None there is no agent, which would import torch for nothing else: the one rank of this node is
    what ``environment`` says.
    """

    def __init__(
        self,
        arguments: Sequence[str] | None,
        job: dict[str, Any],
        *,
        within: Sequence[str] = (),
        **environment: str,
    ) -> None:
        agent = [] if arguments is None else ["-m", "torch.distributed.run", *arguments]
        command = [*within, sys.executable, *agent, str(SCRIPT), json.dumps(job)]
        self._log = Path(job["out"]) / f"agent{len(list(Path(job['out']).glob('agent*')))}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_without_ours() | {"OMP_NUM_THREADS": "1", "TIERING_DEVICE": "cpu"} | environment,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def end(self) -> None:
        """The ranks are in sessions of their own, and end when their agent tells them to."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextlib.contextmanager
def nodes(*started: Node) -> Iterator[tuple[Node, ...]]:
    try:
        yield started
    finally:
        for node in started:
            node.end()


def job(
    out: Path, steps: int = 3, kill: tuple[int, int] | None = None, saves: str = "", **options: Any
) -> dict[str, Any]:
    nvme = out / "nvme"
    nvme.mkdir(parents=True, exist_ok=True)
    rest = {"steps": steps, "options": options, "kill": kill, "saves": saves}
    return {"out": str(out), "nvme": str(nvme), **rest}


def trained(out: Path, world_size: int = 2) -> list[Trained]:
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _without_ours() -> dict[str, str]:
    """The environment of somebody who is not a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith("TORCHELASTIC")}
