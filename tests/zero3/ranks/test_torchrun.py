"""torchrun on one node and on several, and its restarts: what it starts is what the pool starts, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from .pool import Pool
from .test_checkpoint import names_in
from .torchrun import Forked, Node, agent, job, nodes, trained
from .training import train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
STANDALONE = ["--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
def test_one_node(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    with nodes(Node(STANDALONE, job(tmp_path, **STREAMED))) as (node,):
        assert node.wait() == 0, node.log
    for run, expected in zip(trained(tmp_path), ranks(2).run(train, nvme, **STREAMED), strict=True):
        assert run.differing(expected) == []
    assert node.log.count("Placement plan") == 1, "what all ranks say alike is said once"
    assert re.findall("^trained$", node.log, re.MULTILINE) == ["trained"]
    assert list((tmp_path / "nvme").iterdir()) == []


def torchrun(work: dict[str, Any]) -> Node:
    return Node([*STANDALONE, "--max-restarts=1"], work)


def its_agent(work: dict[str, Any]) -> Node:
    return Forked(agent, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started_by", "saves", "resumed_at"),
    [(its_agent, "background", 2), (torchrun, "background", 2), (torchrun, "foreground", 3)],
)
def test_a_rank_that_dies_once_is_started_again_and_the_run_goes_on(
    ranks: Ranks,
    nvme: Path,
    tmp_path: Path,
    started_by: Callable[[dict[str, Any]], Node],
    saves: str,
    resumed_at: int,
) -> None:
    """From the last checkpoint that all had agreed on, to the bits of a run in which nobody died."""
    work = job(tmp_path, steps=5, kill=(1, 3), saves=saves, **STREAMED)
    with nodes(started_by(work)) as (node,):
        assert node.wait() == 0, node.log
    saved = tmp_path / "saved"
    assert f"checkpoint {saved / f'global_step{resumed_at}'} loaded" in node.log
    assert names_in(saved) == {"global_step4", "global_step5", "latest"}
    for run, expected in zip(trained(tmp_path), ranks(2).run(train, nvme, steps=5, **STREAMED), strict=True):
        assert (run.losses, run.norms) == (expected.losses[resumed_at:], expected.norms[resumed_at:])
        run.losses, run.norms = expected.losses, expected.norms
        assert run.differing(expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes(ranks: Ranks, nvme: Path, tmp_path: Path, per_node: int) -> None:
    """Two agents that meet at a store; budgets are those of a node, and LOCAL_WORLD_SIZE says who shares them."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [
        "--nnodes=2",
        f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{meeting.port}",
        "--rdzv-conf=is_host=0",
        "--rdzv-id=two",
    ]
    work = job(tmp_path, **STREAMED)
    with nodes(Node(arguments, work), Node(arguments, work)) as started:
        for node in started:
            assert node.wait() == 0, node.log
    reference = ranks(2 * per_node).run(train, nvme, **STREAMED)
    for run, expected in zip(trained(tmp_path, 2 * per_node), reference, strict=True):
        assert run.differing(expected) == []
