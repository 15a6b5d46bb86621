"""torchrun as a user starts it, on one node or on several; its agent, and a rank by itself, without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import script
from .pool import nursery
from .training import Trained

SCRIPT = Path(__file__).with_name("script.py")
LIMIT = 180  # seconds, on a machine that does other things, too


class Node:
    """One agent with its ranks, in a session of its own; ``job`` is what script.py is told."""

    def __init__(
        self,
        arguments: Sequence[str],
        job: dict[str, Any],
        *,
        within: Sequence[str] = (),
        **environment: str,
    ) -> None:
        agent = ["-m", "torch.distributed.run", *arguments]
        command = [*within, sys.executable, *agent, str(SCRIPT), json.dumps(job)]
        self._log = _log_of(job)
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


class Forked(Node):
    """The same in forks of the server that the pools' ranks are forks of: nobody imports torch for it.

    ``work(job)`` is what the first of them does, with ``environment`` beside what a user has.
    """

    def __init__(
        self, work: Callable[[dict[str, Any]], None], job: dict[str, Any], **environment: str
    ) -> None:
        self._log = _log_of(job)
        variables = {"TIERING_DEVICE": "cpu"} | environment
        self.process: Any = nursery().Process(target=_forked, args=(work, job, self._log, variables))
        self.process.start()

    def wait(self) -> int:
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, self.log
        return self.process.exitcode

    def end(self) -> None:
        self.process.terminate()
        self.process.join(40)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _forked(
    work: Callable[[dict[str, Any]], None], job: dict[str, Any], log: Path, environment: dict[str, str]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(environment)
    work(job)


def one_rank(job: dict[str, Any]) -> None:
    """Which one it is stands in the environment."""
    script.main(**job)


def agent(job: dict[str, Any]) -> None:
    """torchrun's own, on one node with two ranks, which it forks; one of them may die once."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="fork",
    )
    elastic_launch(config, _rank_of_agent)(job)


def _rank_of_agent(job: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent has another answer to it
    script.main(**job)


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


def _log_of(job: dict[str, Any]) -> Path:
    out = Path(job["out"])
    return out / f"agent{len(list(out.glob('agent*')))}"


def _without_ours() -> dict[str, str]:
    """The environment of somebody who is not a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith("TORCHELASTIC")}
