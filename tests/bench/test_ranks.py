"""What bench_ranks.py concludes from turns and traces, and that its sides train the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from frame.report import Report
from frame.side import Place, Spec
from ranks import overlap, replicated, sharded, sides, tables
from ranks.measured import Measured, RanksRun
from ranks.network import Network, NetworkError
from ranks.overlap import Overlap
from ranks.scale import QUICK
from ranks.side import Ranks, Turn

from .known import MB, a_round

Command = Callable[..., tuple[int, str, Any, str]]


@pytest.fixture
def run(place: Place) -> RanksRun:
    return RanksRun(Report("known", {}), place, QUICK, partial(Ranks, networks=False))


def a_turn(*seconds: float, wire: int | None = None) -> Turn:
    """Of as many ranks."""
    counted = {"cpu": 1.0, "sent: reduce": 8e6, "sent: control": 2e3}
    rounds = [
        a_round(value, backward=0.5 * value, loss=5.0, peak=300 * MB, counted=counted) for value in seconds
    ]
    return Turn(rounds, wire)


def measured(name: str, module: str, *seconds: float) -> Measured:
    """Two ranks; of each turn, what the slower one took."""
    turns = [a_turn(value, value / 2, wire=40 * MB) for value in seconds]
    return Measured(name, module, 2, 10**6, 4_000_000, turns, baseline=200 * MB, built=250 * MB)


class TestOverlap:
    def test_what_is_under_way_together_counts_once(self) -> None:
        assert overlap.covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
        assert overlap.covered([]) == 0

    def test_of_a_trace(self, tmp_path: Path) -> None:
        def span(track: str, name: str, began: float, end: float) -> dict[str, Any]:
            return {"ph": "X", "cat": track, "name": name, "ts": began * 1e6, "dur": (end - began) * 1e6}

        events = [
            span("step", "step 3", 10, 20),
            span("network", "gather 'blocks.0'", 9, 12),  # runs over from the step before
            span("network", "reduce 'blocks.1'", 14, 16),
            span("stall", "gather", 11, 12),
            span("stall", "reduce", 15, 17),  # who waited went on a second after it was complete
            span("stall", "agreement", 17, 19),
            span("compute", "forward", 10, 14),
            {"ph": "M", "name": "thread_name", "args": {"name": "step"}},
        ]
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        result = overlap.read(path)
        assert result == Overlap(step=10.0, used=5.0, waited=3.0)
        assert result.share == pytest.approx(0.4)

    def test_a_step_without_a_network_waits_for_nothing(self) -> None:
        assert Overlap(step=1.0, used=0.0, waited=0.0).share == 1


class TestTurn:
    def test_the_slowest_rank_counts(self) -> None:
        turn = a_turn(4.0, 6.0)
        assert (turn.steps, turn.per_step) == (2, 3.0)

    def test_counts_are_per_step(self) -> None:
        turn = a_turn(4.0, 6.0)
        assert turn.counted(1, "sent: ") == 4_001_000
        assert turn.counted(1, "sent: control", "cpu") == 1000.5


class TestCases:
    """Cases on known turns: what they ask for, and what they conclude."""

    def known(self, monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, ...]) -> list[list[Spec]]:
        """Sides of known speed, by the module or by a word of the name; the others have failed."""
        runs = []

        def fake(run: RanksRun, specs: list[Spec]) -> dict[str, Measured]:
            runs.append(specs)
            results = {}
            for spec in specs:
                speeds = [speed for word, speed in seconds.items() if word in f"{spec.module} {spec.name}"]
                if speeds:
                    results[spec.name] = measured(spec.name, spec.module.removeprefix("ranks."), *speeds[-1])
            return results

        monkeypatch.setattr(RanksRun, "measured", fake)
        return runs

    def test_the_fastest_of_fsdp_counts(self, run: RanksRun, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = self.known(monkeypatch, ours=(2.0, 2.0, 2.2), fsdp=(4.0, 4.0, 4.0), ahead=(2.0, 1.9, 1.8))
        sharded.case(run, "fp32")
        (verdict,) = run.report.verdicts
        assert verdict.what == "time per step: ours, stage 3, fp32 / FSDP2, fp32, gathers ahead"
        assert verdict.found.startswith("1.053 ")  # the median of 1, 1.05 and 1.22
        assert not verdict.holds
        ((ours, *peers),) = runs
        assert (ours.ranks, ours.settings["stage"]) == (2, 3)
        ways = [(False, False), (True, False), (True, True)]
        assert [(peer.settings["ahead"], peer.settings["whole"]) for peer in peers] == ways

    def test_bf16_meets_both_ways_to_send_gradients(
        self, run: RanksRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = self.known(monkeypatch, ours=(2.0,), fsdp=(2.1,))
        sharded.case(run, "bf16")
        assert [verdict.holds for verdict in run.report.verdicts] == [True]
        assert {spec.settings["reduce"] for spec in runs[0][1:]} == {"fp32", "bf16"}

    def test_without_a_peer_there_is_no_verdict(self, run: RanksRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known(monkeypatch, ours=(2.0,))
        sharded.case(run, "fp32")
        assert run.report.verdicts == []
        assert run.report.skipped == ["stage 3 beside FSDP2, fp32: not measured without FSDP2"]

    def test_replicated_pairs(self, run: RanksRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known(monkeypatch, ours=(2.0,), ddp=(1.0,), ZeroRedundancyOptimizer=(3.0,), reshard=(2.0,))
        replicated.case(run)
        assert [verdict.holds for verdict in run.report.verdicts] == [False, True, True]

    def test_tables(self, run: RanksRun) -> None:
        ours = measured("ours", "ours", 4.0, 8.0)
        ours.overlaps = [Overlap(1.0, 0.4, 0.1), Overlap(1.0, 0.2, 0.1), Overlap(1.0, 0.2, 0.0)]
        tables.show(run.report, "known", {"ours": ours, "peer": measured("peer", "fsdp", 5.0, 5.0)})
        times, traffic, overlaps = run.report.tables
        assert times.rows[0][:2] == ("ours", "3.000 (2.000-4.000)")
        assert times.rows[1][5:] == ("0.250", "0.50 (0.50-0.50)", "5.0000")
        assert traffic.rows[0] == ("ours", "250", "300", "100", "4.00", "20.00", "10.00")
        assert [row[0] for row in overlaps.rows] == ["ours"]  # the other one does not tell
        assert overlaps.rows[0][4] == "75.0% (50.0%-100.0%)"

    def test_every_stage_has_the_offloads_that_it_allows(self) -> None:
        settings = sides.every_stage()
        assert [sum(stage == expected for stage, _ in settings) for expected in range(4)] == [1, 3, 3, 5]
        assert all(
            "offload_param" not in setting.get("offload", {}) or setting["stage"] == 3
            for setting in settings.values()
        )


@pytest.mark.slow
def test_ours_and_fsdp_train_the_same(place: Place, tmp_path: Path) -> None:
    ours, peer = sides.ours(QUICK.model, 2, 3, "fp32"), sides.fsdp(QUICK.model, 2, "fp32")[0]
    losses = {}
    for spec in (ours, peer):
        with Ranks(spec, place, networks=False) as side:
            losses[spec.module] = [side.turn(1).loss, side.turn(2).loss]
            if spec is ours:
                traces = [overlap.read(file) for file in side.traces(tmp_path / "trace")]
                counted = [side.turns[-1].counted(rank, "sent: ") for rank in range(2)]
    assert losses[ours.module] == pytest.approx(losses[peer.module], rel=1e-5)
    assert losses[ours.module][0] != losses[ours.module][1]
    assert len(traces) == 2
    assert all(0 < trace.used < trace.step and 0 <= trace.share <= 1 for trace in traces)
    assert counted[0] == counted[1] > 0
    assert list(place.directory.iterdir()) == []


def test_the_kernel_counts_what_a_network_of_its_own_carries() -> None:
    try:
        network = Network()
    except NetworkError as refused:
        pytest.skip(f"no network namespace can be made here: {refused}")
    program = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    other, _ = server.accept()
    for _ in range(16):
        client.sendall(bytes(1 << 16))
        assert len(other.recv(1 << 16, socket.MSG_WAITALL)) == 1 << 16
    other.close()
"""
    with network:
        before = network.sent()
        subprocess.run([*network.enter, sys.executable, "-c", program], check=True, timeout=60)
        assert 1 << 20 < network.sent() - before < 1.1 * (1 << 20)


def test_without_a_network_of_their_own_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
    refusing.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkError, match=r"^unshare failed: Operation not permitted$"):
        Network()
    refusing.unlink()
    with pytest.raises(NetworkError, match="unshare cannot be run: No such file"):
        Network()


@pytest.mark.slow
def test_every_case(command: Command, tmp_path: Path) -> None:
    status, text, raw, _ = command("bench_ranks.py", "--quick", "--traces", str(tmp_path / "traces"))
    assert status == (0 if all(goal["holds"] for goal in raw["goals"]) else 1)
    assert len(raw["goals"]) == 1 + len(sharded.PRECISIONS) + 3
    assert raw["goals"][0]["found"] == f"exact in {len(sides.every_stage())} of {len(sides.every_stage())}"
    assert "optimizer and param: nvme" in text
    assert "stages 0, 1 and 2, fp32, 2 ranks: overlap" in text
    assert len(list((tmp_path / "traces").iterdir())) == 5 * 2
