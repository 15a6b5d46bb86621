"""What bench_step.py concludes from rounds, what its cases ask for, and that its sides train the same."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from frame.measured import Measured
from frame.reference_model import Model
from frame.report import Report
from frame.side import BENCH, Place, Side, SideError, Spec
from frame.training import Round, stalls
from step import curve, deepspeed, depth, disk, fio_beside, formats, nvme, ram, sides, start, tables
from step.measured import StepRun
from step.scale import FULL, QUICK

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading

from .known import GB, a_round

SMALL = Model(width=64, layers=1)


@pytest.fixture
def run(place: Place) -> StepRun:
    return StepRun(Report("known", {}), place, QUICK, Side)


def measured(*rounds: Round, name: str = "ours", peaks: tuple[int, int] = (2 * GB, 3 * GB)) -> Measured:
    facts = {"planned_read": GB, "planned_written": GB // 2, "baseline": GB // 4, "parameters": 10**8}
    return Measured(name, facts, list(rounds), peaks)


class TestMeasured:
    def test_a_plan_is_kept_to_the_byte_in_both_directions(self) -> None:
        assert measured(a_round(), a_round()).as_planned
        one_more = a_round(counted={"read": 2 * GB + 1, "written": GB})
        assert not measured(a_round(), one_more).as_planned
        swapped = a_round(counted={"read": GB, "written": 2 * GB})
        assert swapped.moved == a_round().moved
        assert not measured(swapped).as_planned

    def test_the_peak_is_the_larger_of_building_and_training(self) -> None:
        assert measured(a_round(), peaks=(5 * GB, 3 * GB)).peak == 5 * GB
        assert measured(a_round(), peaks=(1 * GB, 3 * GB)).peak == 3 * GB


class TestVerdicts:
    @pytest.mark.parametrize(("seconds", "holds"), [(1.6, True), (1.61, False), (5.0, False)])
    def test_time_is_compared_per_step(self, seconds: float, holds: bool) -> None:
        theirs = measured(a_round(2.0), name="theirs")
        verdict = tables.faster(measured(a_round(2 * seconds, steps=4)), theirs, 0.8)
        assert verdict.holds is holds
        assert verdict.what == "time per step: ours / theirs"

    def test_time_is_compared_round_by_round(self) -> None:
        ours, theirs = (measured(*(a_round(f * s) for s in (1.0, 5.0, 2.0))) for f in (0.7, 1.0))
        assert tables.faster(ours, theirs, 0.8).found == "0.700 (0.700-0.700)"

    def test_memory(self) -> None:
        theirs = measured(a_round(), name="theirs", peaks=(GB, 4 * GB))
        assert tables.smaller(measured(a_round(), peaks=(GB, 36 * GB // 10)), theirs, 0.9).holds
        assert not tables.smaller(measured(a_round(), peaks=(38 * GB // 10, GB)), theirs, 0.9).holds

    def test_bytes(self) -> None:
        verdict = tables.planned(measured(a_round()))
        assert (verdict.holds, verdict.found) == (True, "1,500,000,000")
        verdict = tables.planned(measured(a_round(), a_round(counted={"read": 2 * GB + 2, "written": GB})))
        assert (verdict.holds, verdict.found) == (False, "1,500,000,000 to 1,500,000,001")

    @pytest.mark.parametrize(("seconds", "holds"), [(2.0, True), (2.2, True), (2.3, False), (1.0, True)])
    def test_half_the_bytes_are_to_take_half_the_time(self, seconds: float, holds: bool) -> None:
        half = a_round(seconds, counted={"read": GB, "written": GB // 2})
        assert formats.follows(measured(half), measured(a_round(4.0))).holds is holds

    def test_a_format_that_moves_nothing_follows_nothing(self) -> None:
        still = a_round(counted={"read": 0, "written": 0}, disk=(0, 0))
        assert not formats.follows(measured(still), measured(a_round())).holds

    def test_bytes_per_parameter(self) -> None:
        assert formats.per_parameter(measured(a_round())) == 15.0

    def test_host_overhead_is_what_neither_waiting_nor_the_plain_loop_explains(self) -> None:
        ours = measured(a_round(4.0, settled=0.5, counted={"stalled": 1.0}))
        loop = measured(a_round(0.5))
        assert depth.overhead(ours, loop) == [pytest.approx(1e9 * (2.5 / 2 - 0.25) / 10**8)]

    def test_stalls_by_cause(self) -> None:
        round_ = a_round(counted={"stalled": 1.5, "stalled: staging": 1.0, "stalled: fetch": 0.5, "read": 7})
        assert stalls([round_, round_]) == "staging 0.500 s, fetch 0.250 s"
        assert stalls([a_round()]) == ""


def test_the_tables_of_known_rounds() -> None:
    beside = RunReading(2 * GB, 1 * GB, seconds=1.0, cpu_seconds=0.1)
    ours = measured(
        a_round(4.0), a_round(6.0, counted={"read": 2 * GB, "written": GB, "stalled": 1.5, "retries": 3})
    )
    ours.fio = [beside, beside]
    theirs = measured(a_round(8.0, counted={}), name="theirs")
    theirs.facts = {"baseline": GB}
    report = Report("known", {})
    tables.show(report, "known", {"ours": ours, "theirs": theirs}, ["a note"])
    text = report.markdown()
    assert "| ours | 2.500 (2.000-3.000) | 0.250 | 0.500 | 1.000 | 0.250 | 25.0% | 5.500 |" in text
    assert "| theirs | 4.000 (4.000-4.000) | 0.250 | 0.500 | 1.000 | 0.250 |  | 5.500 |" in text
    assert "| ours | 2.00 | 3.00 | 2.75 | 1.500 | 1.500 | 1.000 + 0.500 | 0.62 (0.50-0.75) | 3.00" in text
    assert "| theirs | 2.00 | 3.00 | 2.00 | 1.500 |  | 1.000 + 0.500 | 0.38 (0.38-0.38) |  |  |" in text
    assert "ours: 3 transfers were retried" in text
    assert "a note" in text


class TestScale:
    def test_budgets_that_run_in_turn_fit_memory(self) -> None:
        assert curve.batches(["6GiB", "1GiB", "3GiB", "4GiB"]) == [["1GiB", "3GiB", "4GiB"], ["6GiB"]]
        assert sum(map(len, curve.batches(FULL.curve))) == len(FULL.curve)

    def test_deepspeed_is_tried_in_four_ways(self) -> None:
        specs = sides.deepspeed_on_nvme(FULL.model, Path("python"))
        zero = [
            deepspeed.configuration({"directory": "/d", **spec.settings})["zero_optimization"]
            for spec in specs
        ]
        assert [stage["offload_optimizer"].get("pipeline_read", False) for stage in zero] == [False, True] * 2
        assert [stage["offload_param"].get("buffer_count") for stage in zero] == [None, None, 24, 24]
        assert all(stage["offload_optimizer"]["nvme_path"] == "/d" for stage in zero)
        assert zero[3]["offload_param"]["buffer_size"] >= 4 * 1024**2  # its largest parameter


class TestSide:
    @pytest.mark.slow
    def test_ours_moves_what_its_plan_says_and_trains_as_the_plain_loop_does(self, place: Place) -> None:
        tiering = {"cache_in_host": False, "host_budget": "20MiB", "device_budget": "8MiB"}
        specs = [sides.plain(QUICK.model), sides.on_nvme(QUICK.model, "ours", tiering)]
        sides_by_name = {}
        for spec in specs:
            with Side(spec, place) as side:
                side.train(1)
                sides_by_name[spec.name] = Measured(
                    side.name, side.facts, [side.train(2), side.train(2)], (0, 0)
                )
        ours, loop = sides_by_name["ours"], sides_by_name[sides.PLAIN]
        assert ours.as_planned
        assert ours.facts["planned_read"] > ours.facts["planned_written"] > 0
        assert ours.facts["parameters"] == loop.facts["parameters"]
        assert [round_.loss for round_ in ours.rounds] == pytest.approx(
            [round_.loss for round_ in loop.rounds], rel=2e-3
        )
        assert list(place.directory.iterdir()) == []

    @pytest.mark.slow
    def test_deepspeed_is_configured_started_and_cleared_away(
        self, place: Place, peers: Path, site: Path
    ) -> None:
        (site / "tiering.py").write_text("raise ImportError('its environment has no tiering')")
        spec = sides.deepspeed_on_nvme(SMALL, peers)[2]
        with Side(spec, place) as side:
            (folder,) = place.directory.iterdir()
            config = json.loads((folder / "config.json").read_text())
            assert side.facts["about"] == "DeepSpeed 0.0.1"
            assert side.train(2).steps == 2
        assert config["zero_optimization"]["offload_param"]["nvme_path"] == str(folder)
        assert config["gradient_clipping"] == 1.0
        assert config["aio"]["block_size"] == 1 << 20
        assert list(place.directory.iterdir()) == []


class TestPeers:
    def test_the_fastest_configuration_that_trains_is_chosen(self, run: StepRun) -> None:
        seconds = {"defaults": 6.0, "fitted buffers": 4.0, "fitted buffers, pipelined": 3.0}
        closed = []

        class Known:
            """A side of known speed. One configuration does not start, another one ends in its second round."""

            def __init__(self, spec: Spec, place: Place) -> None:
                self.name, self.facts, self.rounds = spec.name, {"peak": 2 * GB}, list[Round]()
                self.seconds = seconds.get(spec.name.removeprefix("DeepSpeed, NVMe, "))
                if self.seconds is None:
                    raise SideError(f"{spec.name} does not start")

            def train(self, steps: int) -> Round:
                if self.seconds == 3.0 and self.rounds:
                    raise SideError(f"{self.name} ended")
                self.rounds.append(a_round(self.seconds, steps=steps, peak=GB * (1 + len(self.rounds))))
                return self.rounds[-1]

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *error: object) -> None:
                closed.append(self.name)

        run.start = Known  # type: ignore[assignment]
        run.peers = Path("python")
        chosen = nvme.fastest_deepspeed(run)
        assert chosen is not None
        assert chosen.name == "DeepSpeed, NVMe, fitted buffers"
        (table,) = run.report.tables
        assert [row[:3] for row in table.rows] == [
            ("DeepSpeed, NVMe, defaults", "3.00", "2.00"),
            ("DeepSpeed, NVMe, fitted buffers", "2.00", "2.00"),
        ]
        assert run.report.skipped == [
            "DeepSpeed, NVMe, pipelined does not start",
            "DeepSpeed, NVMe, fitted buffers, pipelined ended",
        ]
        assert len(closed) == 3

    def test_without_fio_the_report_says_so(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with fio_beside.peer_disk(run) as beside:
            assert beside({}) == {}
        assert run.report.skipped == [fio.MISSING]


class TestCases:
    """Cases on known rounds: what they ask for, and what they conclude."""

    def known(self, run: StepRun, monkeypatch: pytest.MonkeyPatch, **by_name: Measured) -> list[Any]:
        runs: list[Any] = []

        def measured(specs: Any, rounds: int, steps: Any, beside: Any = None) -> dict[str, Measured]:
            runs.append((specs, rounds, steps))
            results = {}
            for spec in specs:
                module = spec.module.removeprefix("step.")
                if module in by_name:
                    results[spec.name] = dataclasses.replace(by_name[module], name=spec.name)
            return results

        monkeypatch.setattr(StepRun, "measured", lambda self, *arguments: measured(*arguments))
        return runs

    def holds(self, run: StepRun) -> dict[str, bool]:
        return {verdict.what: verdict.holds for verdict in run.report.verdicts}

    def test_ram(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        run.peers = Path("python")
        self.known(
            run,
            monkeypatch,
            ours=measured(a_round(1.6), peaks=(GB, 2 * GB)),
            plain=measured(a_round(2.0)),
            deepspeed=measured(a_round(5.9)),
        )
        ram.case(run)
        assert self.holds(run) == {
            "time per step: ours, in RAM / plain PyTorch": True,
            "peak RSS: ours, in RAM / plain PyTorch": True,
            "time per step: ours, in RAM / DeepSpeed, cpu offload": False,  # 0.271
        }
        assert run.report.skipped == []

    def test_ram_without_its_peers(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known(run, monkeypatch, ours=measured(a_round()))
        ram.case(run)
        assert run.report.verdicts == []
        assert run.report.skipped == [
            "ours beside the plain loop: not measured without plain PyTorch",
            "everything in RAM beside DeepSpeed: not measured without DeepSpeed",
        ]

    def test_nvme(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")  # without fio
        run.peers = Path("python")
        spec = sides.deepspeed_on_nvme(SMALL, Path("python"))[2]
        monkeypatch.setattr(nvme, "fastest_deepspeed", lambda run: spec)
        runs = self.known(
            run,
            monkeypatch,
            ours=measured(a_round(4.0), peaks=(GB, 2 * GB)),
            deepspeed=measured(a_round(5.0)),
        )
        nvme.case(run)
        assert self.holds(run) == {
            "bytes per step: ours, NVMe, host budget 20MiB": True,
            "peak RSS: ours, NVMe, host budget 20MiB": False,
            f"time per step: ours, NVMe, host budget 20MiB / {spec.name}": True,
            "bytes per step: ours, NVMe, host budget 30MiB": True,
            f"time per step: ours, NVMe, host budget 30MiB / {spec.name}": False,
        }
        ((specs, _, steps),) = runs
        assert [spec.settings["tiering"]["host_budget"] for spec in specs[:2]] == ["20MiB", "30MiB"]
        assert list(steps.values()) == [QUICK.steps, QUICK.steps, QUICK.peer_steps]

    def test_disk(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        ours = measured(a_round(2.2))
        ours.fio = [RunReading(2 * GB, 1 * GB, seconds=2.0, cpu_seconds=0.1)]  # 1.5 GB in 1 s
        runs = self.known(run, monkeypatch, ours=ours)
        disk.case(run)
        subject = "time per step: ours, NVMe, nothing cached / planned bytes at fio's rate"
        assert {verdict.what: verdict.found for verdict in run.report.verdicts}[
            subject
        ] == "1.100 (1.100-1.100)"
        assert runs[0][0][0].settings["tiering"]["cache_in_host"] is False

    def test_formats(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = self.known(run, monkeypatch, ours=measured(a_round()))
        formats.case(run)
        holds = self.holds(run)
        assert not any(holds[f"bytes per parameter: {state}"] for state in formats.BYTES_PER_PARAMETER)
        assert all(outcome for subject, outcome in holds.items() if subject.startswith("bytes per step"))
        states = [spec.settings["tiering"]["state"] for specs, *_ in runs for spec in specs]
        assert states == 2 * ["fp32", "split", "bf16", "split+bf16"]
        assert sum(subject.startswith("time follows bytes") for subject in holds) == 3

    def test_start(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        run.peers = Path("python")
        monkeypatch.setattr(
            start, "first_step", lambda run, spec: (1.0, 3.1 if spec.module == "step.ours" else 15.0)
        )
        start.case(run)
        (verdict,) = run.report.verdicts
        assert (verdict.found, verdict.holds) == ("0.207 (0.207-0.207)", False)

    def test_depth(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known(run, monkeypatch, ours=measured(a_round()), plain=measured(a_round(1.0)))
        depth.case(run)
        assert self.holds(run) == {
            "time in RAM, 4 / 2 blocks": True,
            "time streamed, 4 / 2 blocks": True,
            "host overhead, 4 / 2 blocks": True,
        }

    def test_curve(self, run: StepRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known(run, monkeypatch, ours=measured(a_round()))
        assert list(curve.case(run)) == ["20MiB", "30MiB"]
        assert run.report.tables[0].rows[0] == (
            *("20MiB", "2.000 (2.000-2.000)", "25.0%", "1.500", "3.00", "2.75"),
        )


def test_fio_takes_the_plans_ratio() -> None:
    job = FioJob(("/disk/file",), 64 << 20, "rw", 1 << 20, 16)
    assert "--rwmixread=50" in fio.command(job, "io_uring", (), 1.0)
    assert "--rwmixread=71" in fio.command(dataclasses.replace(job, rwmixread=71), "io_uring", (), 1.0)


def test_the_picture_of_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install tiering[bench]")
    points = {"1GiB": measured(a_round(4.0), a_round(5.0)), "2GiB": measured(a_round(2.0), a_round(2.5))}
    curve.draw(points, "known", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


class TestCommand:
    @pytest.mark.slow
    def test_interrupted_it_ends_its_sides_and_reports_what_it_has(self, tmp_path: Path) -> None:
        disk, report = tmp_path / "disk", tmp_path / "all.md"
        disk.mkdir()
        command = [sys.executable, str(BENCH / "bench_step.py"), str(disk), "--quick", "--rounds", "100000"]
        command += ["--cases", "ram", "--markdown", str(report)]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            output = ""
            while "100000 rounds of" not in output:
                output += (line := process.stderr.readline())
                assert line, output
            process.terminate()
            process.communicate(timeout=60)
        assert process.returncode == 2
        assert "case ram, and what comes after it: interrupted" in report.read_text()
        assert list(disk.iterdir()) == []

    @pytest.mark.slow
    def test_every_case_beside_peers(
        self, command: Callable[..., tuple[int, str, Any, str]], peers: Path, tmp_path: Path
    ) -> None:
        traces = tmp_path / "traces"
        status, text, raw, output = command(
            "bench_step.py", "--quick", "--peers", str(peers), "--traces", str(traces)
        )
        assert status == 2  # two of DeepSpeed's configurations fail, as they are made to
        assert text.count("failed: AssertionError: cannot pipeline") == 2
        without_fio = fio.MISSING in raw["skipped"]
        assert [line for line in raw["skipped"] if "not measured" in line and "fio" not in line] == []
        goals = " / ".join(goal["what"] for goal in raw["goals"])
        for expected in (*formats.BYTES_PER_PARAMETER, "fio's rate", "import to first step", "host overhead"):
            assert expected in goals or (expected == "fio's rate" and without_fio)
        assert json.loads((traces / "ours-in-RAM.json").read_text())
        assert all(len(side["rounds"]) >= QUICK.rounds for side in raw["sides"])
        assert "case nvme1 and nvme3" in output

    @pytest.mark.slow
    def test_without_peers_their_rows_are_left_out(
        self, command: Callable[..., tuple[int, str, Any, str]]
    ) -> None:
        status, text, raw, _ = command("bench_step.py", "--quick", "--cases", "nvme1")
        assert status == (0 if all(goal["holds"] for goal in raw["goals"]) else 1)
        assert [goal["what"].partition(":")[0] for goal in raw["goals"]] == ["bytes per step", "peak RSS"]
        assert "--peers names no environment that has it" in text
        assert "beside DeepSpeed's NVMe offload: not measured without DeepSpeed" in text
