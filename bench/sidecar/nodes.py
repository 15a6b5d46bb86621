"""Simulated nodes: each is a port of this process that answers as the tierd of a node with a few ranks.

``python -m sidecar.nodes JSON`` prints the addresses, separated by commas, and answers until its input ends. All ranks
belong to one run, and make a step every second.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace

from service.responses.readings import readings
from service.view import RankView, RunView, View
from tiering.telemetry import (
    CollectiveStatus,
    ConfigurationStatus,
    Description,
    DirectionStatus,
    IoEngineStatus,
    LatencyStatus,
    PathStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

STEPS = 32
SETTINGS = 80


def snapshot(node: int, rank: int, nodes: int, ranks: int, step: int) -> Snapshot:
    """What a rank publishes that swaps to four paths; its figures have as many digits as real ones."""
    now, gib = time.time(), 1 << 30
    return Snapshot(
        "gpt-175b",
        rank,
        nodes * ranks,
        4000 + rank,
        1.7e9,
        step,
        "forward",
        2.3456789,
        run_id="gpt-175b-5f3a9c20",
        node=f"node{node:03}",
        local_rank=rank % ranks,
        local_world_size=ranks,
        global_step=step,
        phase_since=now,
        samples=step * 512,
        gradient_norm=0.7654321,
        learning_rate=1.234e-4,
        phase_seconds={"forward": 0.3 * step, "backward": 0.4 * step, "step": 0.2 * step, "idle": 0.1 * step},
        tiers=[
            TierStatus(
                name, 64 * gib, 128 * gib, 60 * gib, 62 * gib, {"parameters": 20 * gib, "staging": 40 * gib}
            )
            for name in ("device", "host", "nvme")
        ],
        io=[
            PathStatus(
                f"/nvme{number}/swap",
                "io_uring",
                True,
                direction(rank, step, 0.9),
                direction(rank, step, 0.8),
                queue_full_seconds=0.1,
                measured_bytes_per_second=6e9,
            )
            for number in range(4)
        ],
        io_engine=IoEngineStatus("io_uring", ["registered_buffers"], 8 << 20),
        collectives=[CollectiveStatus(kind, step * 96, step * 10**9) for kind in ("all-gather", "reduce")],
        stalls={"gather": 0.25 * step, "optimizer state": 0.12 * step},
        stalls_by_phase={"forward": {"gather": 0.25 * step}, "step": {"optimizer state": 0.12 * step}},
        steps=[record(rank, number, now - step + number) for number in range(step - STEPS, step)],
    )


def direction(rank: int, step: int, factor: float) -> DirectionStatus:
    """The transfers of a path in one direction up to a step; ``factor`` is their part of the usual rate."""
    return DirectionStatus(
        int(24e9 * factor) * step + rank,
        step * 480,
        busy_seconds=step * factor,
        bytes_per_second=3.3e9 * factor,
        average_bytes_per_second=3.1e9 * factor,
        peak_bytes_per_second=3.9e9 * factor,
        latency_buckets=[0] * 18 + [step * number for number in range(1, 14)],
        latency_seconds=step * factor,
        latency=LatencyStatus(*(factor * noise(rank) / part for part in (9, 7, 5, 3, 1))),
    )


def record(rank: int, number: int, ended_at: float) -> StepRecord:
    """One step. Rank 13 waits less than the others, so that it is a straggler."""
    wait = 0.05 if rank == 13 else 0.25 + noise(rank) / 3
    stalls = {"gather": wait, "optimizer state": 0.1234567 + noise(rank), "parameters": 0.0234567}
    return StepRecord(
        number,
        1.0123456 + noise(rank) / 9,
        forward=0.3123456,
        backward=0.4123456,
        update=0.2123456,
        stall=sum(stalls.values()),
        read_bytes=23_456_789_012,
        written_bytes=22_456_789_012,
        sent_bytes=3_456_789_012,
        stalls=stalls,
        ended_at=ended_at,
        h2d_bytes=9_123_456_789,
        d2h_bytes=8_123_456_789,
    )


def noise(rank: int) -> float:
    """The difference of a rank from the others, in seconds."""
    return rank / 7e3


DESCRIPTION = Description(
    "cuda:0 NVIDIA H100 80GB HBM3",
    {"tiering": "0.1.0", "torch": "2.9.0", "python": "3.11.7"},
    ConfigurationStatus(
        "ds_config.json",
        "batch 512, bf16, ZeRO stage 3, optimizer state on nvme",
        settings=[
            SettingStatus(
                f"zero_optimization.key_{number}", number, "default", "honoured", "a note of some length"
            )
            for number in range(SETTINGS)
        ],
    ),
)


class Node:
    """One simulated node."""

    def __init__(self, number: int, nodes: int, ranks: int, started: float) -> None:
        self._number, self._nodes, self._ranks, self._started = number, nodes, ranks, started

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        # tierd closes the connection, or this process ends.
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = gzip.compress(self._body(described=b"descriptions=false" not in head), 1)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
                    b"content-length: %d\r\n\r\n" % len(body) + body
                )
                await writer.drain()

    def _body(self, *, described: bool) -> bytes:
        step = STEPS + 1 + int(time.time() - self._started)
        ranks = range(self._number * self._ranks, (self._number + 1) * self._ranks)
        views = tuple(
            RankView(
                rank,
                "live",
                "",
                0.1,
                snapshot(self._number, rank, self._nodes, self._ranks, step),
                replace(DESCRIPTION, device=f"cuda:{rank % self._ranks} NVIDIA H100 80GB HBM3"),
                time.time(),
            )
            for rank in ranks
        )
        view = View(time.time(), (RunView("gpt-175b-5f3a9c20", "gpt-175b", views, "train"),))
        return readings(view, described).model_dump_json().encode()


async def main(nodes: int, ranks: int) -> None:
    started = time.time()
    servers = [
        await asyncio.start_server(Node(number, nodes, ranks, started).serve, "127.0.0.1", 0)
        for number in range(nodes)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(",".join(f"127.0.0.1:{port}" for port in ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
