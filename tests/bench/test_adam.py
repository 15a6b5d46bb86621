"""What bench_adam.py concludes from times, and that each of its rows does the work that it is charged for."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adam import goals, many, readings, start, steps, tables, values, worker
from adam.goals import Goal, judge, judged, narrower
from adam.peer import Peer
from adam.readings import ROOF, Part, Readings, Row
from frame.report import Report, Table
from frame.side import SideError
from rich.console import Console

from optim_cpu import formats, kernels

Command = Callable[..., tuple[int, str, Any, str]]

NUMEL = 1_000_000


@pytest.fixture(autouse=True)
def leave_kernels_as_they_were() -> Iterator[None]:
    isa, threads, theirs = kernels.instruction_set(), kernels.thread_count(), torch.get_num_threads()
    yield
    kernels.set_instruction_set(isa)
    kernels.set_thread_count(threads)
    torch.set_num_threads(theirs)


def row(name: str, nbytes: int, *ms: float, isa: str = "") -> Readings:
    return Readings(name, nbytes, NUMEL, ms, isa)


def part(*rows: Readings, name: str = "step") -> Part:
    return Part(name, f"{name}: known", 2, "avx512", list(rows))


class TestReadings:
    def test_rates(self) -> None:
        reading = row("x", 28, 2.0, 4.0)
        assert reading.rates == [500_000, 250_000]
        assert reading.gb_per_s == [pytest.approx(14.0), pytest.approx(7.0)]

    def test_every_row_is_run_once_per_round(self) -> None:
        calls: list[str] = []

        def side(label: str) -> float:
            calls.append(label)
            return float(len(calls))

        rows = [
            Row("a", 8, 10, lambda: side("a")),
            Row("b", 28, 10, lambda: side("b, avx2"), "avx2"),
            Row("b", 28, 10, lambda: side("b, avx512"), "avx512"),
        ]
        results = readings.measure(3, rows)
        assert [result.label for result in results] == ["a", "b, avx2", "b, avx512"]
        for result in results:
            mine = [float(number) for number, label in enumerate(calls, 1) if label == result.label]
            assert list(result.ms) == mine[1:]  # the first round is dropped
            assert len(result.ms) == 3

    def test_settling_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr(readings.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
        monkeypatch.setattr(readings.time, "perf_counter", lambda: clock[0])
        run = readings.timed(lambda: clock.__setitem__(0, clock[0] + 0.007))
        assert run() == pytest.approx(7.0)
        assert clock[0] == pytest.approx(0.007 + readings.SETTLE)


class TestGoals:
    def test_ratios_are_of_each_round(self) -> None:
        """Medians alone would say 1.0."""
        measured = part(
            row("torch fused: step alone", 28, 1.0, 4.0, 8.0), row("fp32", 28, 2.0, 2.0, 4.0, isa="avx512")
        )
        comparison = judge(Goal("fp32", "torch fused: step alone", 1.0), measured)
        assert comparison is not None
        assert comparison.ratio().point == pytest.approx(2.0)
        assert comparison.ratio([0]).point == pytest.approx(0.5)
        assert comparison.verdict().holds
        assert comparison.verdict().found.startswith("2.000 (0.500-2.000)")

    @pytest.mark.parametrize(("theirs", "holds"), [(13.58, True), (13.57, False)])
    def test_a_byte_ratio_comes_from_the_rows(self, theirs: float, holds: bool) -> None:
        measured = part(row("peer", 40, theirs), row("ours", 28, 10.0, isa="avx512"))
        comparison = judge(Goal("ours", "peer", 0.95, per_byte=True), measured)
        assert comparison is not None
        assert comparison.at_least == pytest.approx(0.95 * 40 / 28)
        assert comparison.goal == "at least 1.357, 0.95 of 40/28"
        assert comparison.verdict().holds is holds

    @pytest.mark.parametrize(("ms", "holds"), [(36.8, True), (36.9, False)])
    def test_the_roof_is_a_rate_of_bytes(self, ms: float, holds: bool) -> None:
        measured = part(row(ROOF, 8, 10.0), row("fp32", 28, ms, isa="avx512"))
        comparison = judge(Goal("fp32", ROOF, 0.95, per_byte=True), measured)
        assert comparison is not None
        assert comparison.ratio().point == pytest.approx(35.0 / ms)  # 28 bytes take 3.5 times as long as 8
        assert comparison.verdict().holds is holds

    def test_our_own_rows_are_compared_in_the_first_instruction_set(self) -> None:
        measured = part(
            row("bf16 in/out", 28, 99.0, isa="avx2"),
            row("bf16 in/out", 28, 28.0, isa="avx512"),
            row("split", 26, 1.0, isa="avx2"),
            row("split", 26, 26.0, isa="avx512"),
        )
        (comparison,) = judged(measured)
        assert comparison.ratio().point == pytest.approx(28 / 26)
        assert comparison.verdict().goal == "at least 1.045, 0.97 of 28/26"

    def test_what_was_not_measured_is_not_judged(self) -> None:
        assert judged(part(row("fp32", 28, 1.0, isa="avx512"))) == []
        against = {goal.against for goal in goals.STEP_GOALS}
        assert {"DeepSpeedCPUAdam: step alone", "DeepSpeedCPUAdam: whole job"} < against

    def test_avx2_is_judged_where_avx512_waits_for_memory(self) -> None:
        measured = part(
            row(ROOF, 8, 8.0),
            row("waits", 20, 22.0, isa="avx512"),  # 0.909 of the roof
            row("waits", 20, 23.3, isa="avx2"),
            row("computes", 20, 22.3, isa="avx512"),  # 0.897
            row("computes", 20, 50.0, isa="avx2"),
        )
        (comparison,) = narrower(measured)
        assert comparison.what == "step: waits, avx2 / avx512"
        assert comparison.ratio().point == pytest.approx(22 / 23.3)
        assert not comparison.verdict().holds

    def test_the_goals_of_the_small_tensors(self) -> None:
        measured = part(
            row(ROOF, 8, 1.0),
            row(many.TORCH, 28, 3.0),
            row(many.OURS, 28, 2.0, isa="avx512"),
            name="many, uniform",
        )
        (comparison,) = judged(measured)
        assert comparison.verdict().what == "many, uniform: ours / torch fused"
        assert comparison.verdict().holds
        measured.rows[1] = row(many.TORCH, 28, 2.99)
        assert not judged(measured)[0].verdict().holds

    @pytest.mark.parametrize(("ms", "holds"), [(299.0, True), (300.0, False)])
    def test_the_first_step(self, ms: float, holds: bool) -> None:
        verdict = goals.start_verdict(part(Readings(start.OURS, 0, 0, (1.0, ms, 900.0)), name="start"))
        assert (verdict.found, verdict.holds) == (f"{ms:.0f} ms", holds)


class TestTwoSpeeds:
    ROOF_MS = (1.0, 2.0, 1.1, 1.9)

    def test_rounds_part_at_the_middle(self) -> None:
        assert tables.two_speeds(part(row(ROOF, 8, *self.ROOF_MS))) == ([1, 3], [0, 2])
        assert tables.two_speeds(part(row(ROOF, 8, 1.0, 1.2))) is None

    def test_each_gets_its_ratio(self) -> None:
        measured = part(
            row(ROOF, 8, *self.ROOF_MS),
            row("torch fused: step alone", 28, 10.0, 30.0, 10.0, 30.0),
            row("fp32", 28, 10.0, 20.0, 10.0, 20.0, isa="avx512"),
        )
        table = tables.by_speed(measured, judged(measured)[:1])
        assert table is not None
        assert table.columns == ("what", "2 slow rounds", "2 fast rounds")
        assert table.rows[0] == ("roof, GB/s", "4.1 (4.0-4.2)", "7.6 (7.3-8.0)")
        assert table.rows[1][1:] == ("1.500 (1.500-1.500)", "1.000 (1.000-1.000)")


def table_rows(table: Table) -> dict[str, list[str]]:
    return {first: rest for first, *rest in table.rows}


def test_the_report_of_known_times() -> None:
    report = Report("known", {})
    step = part(
        row(ROOF, 8, 8.0, 8.0),
        row("torch fused: step alone", 28, 30.0, 40.0),
        row("fp32", 28, 32.0, 28.0, isa="avx512"),
        row("fp32", 28, 64.0, 70.0, isa="avx2"),
    )
    step.notes.append("a note")
    first = Part("start", "start: known", 2, "", [Readings(start.OURS, 0, 0, (250.0, 260.0))])
    tables.fill(report, [step, first])
    speed, ratio, starts = report.tables
    fp32 = ["28", "30.0 (28.0-32.0)", "0.9 (0.9-1.0)", "0.935 (0.875-1.000)"]
    assert table_rows(speed)["fp32, avx512"] == fp32
    assert table_rows(speed)[ROOF] == ["8", "8.000 (8.000-8.000)", "1.0 (1.0-1.0)", ""]
    assert speed.notes[0] == "a note"
    assert ratio.columns == ("ours", "/ torch fused: step alone", "/ avx512")
    assert table_rows(ratio)["fp32, avx512"][1] == ""
    assert table_rows(ratio)["fp32, avx2"][1] == "0.447 (0.400-0.500)"  # the geometric mean of two
    assert table_rows(starts) == {start.OURS: ["255 (250-260)"]}
    verdicts = {verdict.what: verdict.holds for verdict in report.verdicts}
    assert verdicts == {
        "step: fp32 / torch fused: step alone": True,
        "step: fp32, fraction of the roof": False,
        "step: fp32, avx2 / avx512": False,
        "import and first step": True,
    }
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    assert "fp32, avx2" in console.export_text()
    assert "| fp32, avx2 | 0.518" in report.markdown()


class TestSteps:
    """Each row does what it is charged for."""

    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> steps.Model:
        monkeypatch.setattr(readings, "SETTLE", 0.0)
        return steps.Model(5000)

    def test_bytes_per_parameter(self, model: steps.Model) -> None:
        (isa, *_) = kernels.available_instruction_sets()
        assert {row.name: row.nbytes for row in model.rows((isa,), None)} == {
            ROOF: 8,
            "torch fused: step alone": 28,
            "torch fused: whole job": 40,
            "fp32": 28,
            "bf16 in/out": 28,
            "fp16 in/out": 28,
            "bf16 moments": 20,
            "bf16 moments, stochastic": 20,
            "split": 26,
            "split + bf16 moments": 18,
            "split + bf16 moments, stochastic": 18,
            "Lion, bf16 in/out": 20,
            "Adagrad, bf16 in/out": 20,
            "SGD with momentum, bf16 in/out": 20,
        }

    def test_every_row_touches_what_it_names(self, model: steps.Model) -> None:
        halves = {"out": model.half_out, "split": model.split, "remainder": model.remainder}
        tensors = {"master": model.master, "grad": model.grad, **halves}
        tensors |= zip(("m", "v"), model.wide, strict=True)
        tensors |= zip(("m16", "v16"), model.narrow, strict=True)
        wide = {"master", "m", "v"}
        expected = {
            ROOF: set(),
            "torch fused: step alone": wide,
            "torch fused: whole job": wide | {"out", "grad"},
            "fp32": wide,
            "bf16 in/out": wide | {"out"},
            "fp16 in/out": wide | {"out"},
            "bf16 moments": {"master", "m16", "v16", "out"},
            "bf16 moments, stochastic": {"master", "m16", "v16", "out"},
            "split": {"split", "remainder", "m", "v"},
            "split + bf16 moments": {"split", "remainder", "m16", "v16"},
            "split + bf16 moments, stochastic": {"split", "remainder", "m16", "v16"},
            "Lion, bf16 in/out": {"master", "m", "out"},
            "Adagrad, bf16 in/out": {"master", "v", "out"},
            "SGD with momentum, bf16 in/out": {"master", "m", "out"},
        }
        (isa, *_) = kernels.available_instruction_sets()
        for row in model.rows((isa,), None):
            for tensor in tensors.values():
                tensor.copy_(torch.rand(5000) + 0.5 if tensor.is_floating_point() else torch.tensor(7))
            for moment in (*model.wide, *model.narrow):  # so small that even bf16 moves
                moment.mul_(0.01)
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            assert row.run() > 0
            changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
            assert changed - {"split"} == expected[row.name] - {"split"}, row.name  # its steps are small

    def test_the_copies_are_of_the_parameter(self, model: steps.Model) -> None:
        model.torch_whole()
        assert torch.equal(model.half_out, model.master.bfloat16())
        assert torch.equal(model.grad, model.half_grad.float())
        (isa, *_) = kernels.available_instruction_sets()
        rows = {row.name: row for row in model.rows((isa,), None)}
        rows["bf16 in/out"].run()
        rounded = torch.empty_like(model.half_out)
        formats.round_parameters(model.master, rounded)
        assert torch.equal(model.half_out, rounded)
        rows["fp16 in/out"].run()
        assert torch.equal(model.half_out.view(torch.float16), model.master.half())

    def test_the_instruction_set_is_forced(self, model: steps.Model) -> None:
        isas = kernels.available_instruction_sets()
        for row in model.rows(isas, None):
            row.run()
            if row.isa:
                assert kernels.instruction_set() == row.isa
        assert len({row.isa for row in model.rows(isas, None)}) == len(isas) + 1

    def test_many_rounds_leave_ordinary_values(self, model: steps.Model) -> None:
        readings.measure(30, model.rows(kernels.available_instruction_sets(), None))
        assert model.odd() == 0
        assert float(model.master.abs().max()) < 1.0
        model.wide[1][values.STRIDE] = 1e-40
        model.narrow[0][2 * values.STRIDE] = torch.inf
        assert model.odd() == 2

    def test_arrays_of_one_step_start_apart_in_a_page(self) -> None:
        model = steps.Model(5000)
        m, v = model.torch_adam.state[model.parameter]["exp_avg"], model.wide[1]
        for together in (
            (model.parameter, model.grad, m, v, model.half_out),
            (model.parameter, model.half_grad, *model.narrow, model.half_out),
            (model.split, model.fp16_grad, *model.narrow, model.remainder),
        ):
            places = [tensor.data_ptr() % values.PAGE for tensor in together]
            assert places == [0, 512, 1024, 1536, 2048 if together[-1] is model.half_out else 2560]
        assert model.wide[0] is m  # what torch steps is what we step
        plain = steps.Model(5000, apart=False)
        tensors = (plain.parameter, plain.grad, *plain.wide, *plain.narrow, plain.half_out, plain.remainder)
        assert {tensor.data_ptr() % values.PAGE for tensor in tensors} == {0}

    def test_gradients_stay_clear_of_zero(self) -> None:
        grad = values.gradients(1001)
        assert float(grad.abs().min()) >= 0.5
        assert int((grad < 0).sum()) == 501


class TestPeer:
    @pytest.mark.slow
    def test_it_works_when_told_to(self, peers: Path) -> None:
        with Peer(peers, steps.Model(1000), 1) as peer:
            assert peer.about == f"DeepSpeedCPUAdam 0.0.1 (AVX512, torch {torch.__version__})"
            assert peer.run("step") > 0
            assert peer.run("whole") > 0
            result = peer.check()
            assert (result["step"], result["odd"]) == (3, 0)  # one of them makes the moments
            assert peer.busy > 0
            assert 0 <= peer.idle_cpu < 1

    def test_the_whole_job_is_cast_step_and_copy(
        self, peers: Path, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(site))
        model = steps.Model(1000)
        job = worker.Worker(1, **model.for_peer())
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
        job.grad.zero_()
        before = job.parameter.detach().clone()
        job.whole()
        assert torch.equal(job.grad, job.half_grad.float())
        assert not torch.equal(job.parameter, before)
        assert torch.equal(job.half_out, job.parameter.detach().bfloat16())
        for theirs, ours in (
            (job.parameter, model.master),
            (job.grad, model.grad),
            (job.half_out, model.half_out),
        ):
            assert torch.equal(theirs.detach(), ours)
            assert theirs.data_ptr() != ours.data_ptr()  # the same pages, mapped twice

    def test_its_milliseconds_are_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Fixed:
            def run(self, job: str) -> float:
                return {"step": 30.0, "whole": 40.0}[job]

        peer: Any = Fixed()
        rows = {row.name: row for row in steps.Model(100).rows((kernels.instruction_set(),), peer)}
        assert rows["DeepSpeedCPUAdam: step alone"].run() == 30.0
        assert rows["DeepSpeedCPUAdam: whole job"].run() == 40.0
        assert rows["DeepSpeedCPUAdam: whole job"].nbytes == 40

    def test_an_interpreter_without_it_gets_the_recipe(self) -> None:
        with pytest.raises(SideError, match=r"No module named 'deepspeed'.*pass --peers DIR/bin/python"):
            Peer(Path(sys.executable), steps.Model(1000), 1)


class TestMany:
    def test_both_step_every_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readings, "SETTLE", 0.0)
        model = many.Model("log-uniform", 50, largest=1000)
        rows = {row.name: row for row in model.rows(kernels.instruction_set())}
        assert {name: row.nbytes for name, row in rows.items()} == {ROOF: 8, many.TORCH: 28, many.OURS: 28}
        assert (
            model.numel == sum(parameter.numel() for parameter in model.parameters) == rows[many.OURS].numel
        )
        for name in (many.TORCH, many.OURS):
            before = [parameter.detach().clone() for parameter in model.parameters]
            assert rows[name].run() > 0
            assert not any(torch.equal(*pair) for pair in zip(before, model.parameters, strict=True))
        assert model.odd() == 0
        model.our_adam.state[model.parameters[0]]["exp_avg"].view(-1)[0] = torch.nan
        assert model.odd() == 1


class TestStart:
    @pytest.fixture
    def without_torch(self, tmp_path: Path) -> dict[str, str]:
        """Variables of processes for which a few lines pass for torch, which takes seconds to import."""
        (tmp_path / "torch.py").write_text(
            "class nn:\n"
            "    class Parameter:\n"
            "        def __init__(self, values): pass\n"
            "        def detach(self): return self\n"
            "        def clone(self): return self\n"
            "def randn(*shape): pass\n"
            "def randn_like(parameter): pass\n"
            "def equal(one, other): return one is other\n"
        )
        return os.environ | {"PYTHONPATH": str(tmp_path)}

    @pytest.mark.slow
    def test_a_first_step_of_torchs_is_timed(self) -> None:
        assert 0 < start.first_step(Path(sys.executable), start.IMPORTS["torch fused"], os.environ) < 60_000

    def test_a_first_step_is_timed_with_its_import(self, without_torch: dict[str, str]) -> None:
        stepping = (
            "time.sleep(0.05)\n"
            "class AdamW:\n"
            "    def __init__(self, parameters, lr): self.parameters = parameters\n"
            "    def step(self): time.sleep(0.05); self.parameters[:] = map(object.__new__, [object] * 24)"
        )
        assert 100 <= start.first_step(Path(sys.executable), stepping, without_torch) < 60_000

    def test_what_cannot_be_imported_is_an_error(self, without_torch: dict[str, str]) -> None:
        with pytest.raises(SideError, match=r"No module named 'deepspeed'.*pip install torch deepspeed"):
            start.first_step(Path(sys.executable), start.IMPORTS["DeepSpeedCPUAdam"], without_torch)

    def test_a_step_that_does_nothing_is_an_error(self, without_torch: dict[str, str]) -> None:
        idle = "class AdamW:\n    def __init__(self, *a, **k): pass\n    def step(self): pass"
        with pytest.raises(SideError, match="the step changed nothing"):
            start.first_step(Path(sys.executable), idle, without_torch)


class TestCommand:
    SIZES = ("--numel", "2000", "--rounds", "2", "--isa", kernels.instruction_set())

    @pytest.mark.slow
    def test_both_parts_beside_a_peer(self, command: Command, peers: Path) -> None:
        status, text, raw, _ = command(
            "bench_adam.py", *self.SIZES, "--part", "step", "single", "--peers", str(peers), directory=False
        )
        assert status == (0 if all(goal["holds"] for goal in raw["goals"]) else 1)
        assert [(part["name"], part["threads"] == 1) for part in raw["parts"]] == [
            ("step", kernels.thread_count() == 1),
            ("single", True),
        ]
        assert all(len(row["ms"]) == 2 for part in raw["parts"] for row in part["rows"])
        assert raw["skipped"] == []
        assert "- peer: DeepSpeedCPUAdam 0.0.1 (AVX512, torch" in text
        # One step makes the moments; there are two in each of three rounds.
        assert "DeepSpeed, step 7: no odd values" in text
        assert text.count("DeepSpeedCPUAdam: whole job |") >= 2

    @pytest.mark.slow
    def test_a_peer_that_cannot_be_had_is_reported(self, command: Command, tmp_path: Path) -> None:
        nowhere = str(tmp_path / "nowhere")
        status, _, raw, _ = command(
            "bench_adam.py", *self.SIZES, "--part", "step", "--peers", nowhere, directory=False
        )
        assert status == 2
        assert "nowhere cannot be run (No such file" in raw["skipped"][0]
        assert raw["parts"] == []
