"""The frame of the benchmarks: processes that answer calls, sides that fail loudly, rounds, reports and exit status."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frame import command, machine, process
from frame.plain_loop import PlainLoop
from frame.reference_model import Model
from frame.report import Report, Table, Verdict, middle
from frame.rounds import Run
from frame.side import BENCH, Place, Side, SideError, Spec
from frame.training import Trainer, train
from rich.console import Console

from .known import GB, a_round

SMALL = Model(width=64, layers=1)

WORKER = """
import sys
from frame.child import serve

class Worker:
    def __init__(self, settings, **others): self.total = settings.get("start", 0)
    def facts(self):
        print("a banner on standard output")
        return {"start": self.total}
    def add(self, number):
        self.total += number
        return self.total
    def fail(self): raise ValueError("no such number")
    def close(self): print("closed at", self.total, file=sys.stderr)

serve(Worker)
"""


class TestChild:
    def run(self, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], str, int]:
        """Answers, standard error and status of a process with ``WORKER``."""
        lines = "".join(json.dumps(call) + "\n" for call in calls)
        done = subprocess.run(
            [sys.executable, "-c", WORKER], input=lines, cwd=BENCH, capture_output=True, text=True, timeout=60
        )
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr, done.returncode

    def test_calls_are_answered_in_order_until_the_input_ends(self) -> None:
        answers, output, status = self.run(
            ("start", {"settings": {"start": 5}}), ("add", {"number": 2}), ("add", {"number": 3})
        )
        assert answers == [{"start": 5}, 7, 10]
        assert output.splitlines() == ["a banner on standard output", "closed at 10"]
        assert status == 0

    def test_an_exception_is_the_last_answer(self) -> None:
        answers, output, status = self.run(("start", {"settings": {}}), ("fail", {}), ("add", {"number": 1}))
        assert answers == [{"start": 0}, {"error": "ValueError: no such number"}]
        assert "Traceback" in output and "closed at 0" in output
        assert status == 1


class TestSide:
    def test_one_that_does_not_start_says_why(self, place: Place, interpreter: Callable[[str], Path]) -> None:
        failing = interpreter("echo no compiler >&2; exit 3")
        with pytest.raises(SideError, match=r"^known ended with status 3; its last output: no compiler$"):
            Side(Spec("known", "step.plain", SMALL, python=failing, on_disk=True), place)
        assert list(place.directory.iterdir()) == []

    @pytest.mark.slow
    def test_one_that_raises_says_why(self, place: Place) -> None:
        with pytest.raises(SideError, match=r"known failed: KeyError: 'tiering'"):
            Side(Spec("known", "step.ours", SMALL, on_disk=True), place)
        assert list(place.directory.iterdir()) == []

    def test_an_interpreter_that_is_not_there(self, place: Place, tmp_path: Path) -> None:
        with pytest.raises(SideError, match=r"known: .*nowhere cannot be run \(No such file"):
            Side(Spec("known", "step.plain", SMALL, python=tmp_path / "nowhere"), place)

    def test_one_that_does_not_answer_is_ended_with_what_it_started(
        self, place: Place, tmp_path: Path, interpreter: Callable[[str], Path]
    ) -> None:
        silent = interpreter(f"sleep 600 & echo $! $$ > {tmp_path}/pids; echo waiting for a lock >&2; wait")
        with pytest.raises(
            SideError, match=r"gave no answer within 1 s and was ended; its last output: waiting for a lock"
        ):
            Side(Spec("hung", "step.plain", SMALL, python=silent, on_disk=True), replace(place, patience=1))
        assert list(place.directory.iterdir()) == []
        assert not any(alive(pid) for pid in (tmp_path / "pids").read_text().split())

    def test_the_rank_that_ends_is_named(self, place: Place, interpreter: Callable[[str], Path]) -> None:
        half = interpreter('test "$RANK" = 0 && exec sleep 600; echo no network >&2; read line; exit 3')
        with pytest.raises(
            SideError, match=r"^rank 1 of known ended with status 3; its last output: no network"
        ):
            Side(Spec("known", "ranks.ours", SMALL, ranks=2, python=half, on_disk=True), place)
        assert list(place.directory.iterdir()) == []

    def test_the_rank_that_does_not_answer_is_named_and_all_are_ended(
        self, place: Place, tmp_path: Path, interpreter: Callable[[str], Path]
    ) -> None:
        half = interpreter(
            f'echo $$ >> {tmp_path}/pids; read line; test "$RANK" = 1 && echo "{{}}"; exec sleep 600'
        )
        with pytest.raises(SideError, match=r"^rank 0 of known gave no answer within 1 s"):
            Side(Spec("known", "ranks.ours", SMALL, ranks=2, python=half), replace(place, patience=1))
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2 and not any(alive(pid) for pid in pids)

    def test_one_that_fails_later_is_killed_at_once(
        self, place: Place, interpreter: Callable[[str], Path]
    ) -> None:
        hangs = interpreter('read line; echo "{}"; echo in a deadlock >&2; exec sleep 600')
        with Side(Spec("known", "step.plain", SMALL, python=hangs), place) as side:
            (pid,) = map(str, side.pids)
            with pytest.raises(SideError, match=r"gave no answer within 0 s and was ended; .*in a deadlock"):
                side.call("train", patience=0.4, steps=1)
            assert not alive(pid)

    @pytest.mark.slow
    def test_it_trains_in_a_process_of_its_own(self, place: Place) -> None:
        with Side(Spec("known", "step.plain", SMALL), place) as side:
            rounds = [side.train(1), side.train(2)]
        assert side.facts["parameters"] == sum(parameter.numel() for parameter in SMALL.build().parameters())
        assert 0 < side.facts["torch"] < rounds[0].age < rounds[1].age
        assert [round_.steps for round_ in rounds] == [1, 2] and side.rounds == rounds
        assert rounds[1].seconds >= rounds[1].forward + rounds[1].backward + rounds[1].update > 0
        assert 0 < side.facts["baseline"] < rounds[1].peak


def alive(pid: str) -> bool:
    """Whether it lives on for some seconds: a killed process ends when it is scheduled. A zombie does not live."""
    for _ in range(100):
        try:
            if Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True


class TestTraining:
    def test_a_round_has_what_the_side_counted_meanwhile(self) -> None:
        class Counting(Trainer):
            total = 10.0

            def forward(self, tokens: Any, targets: Any) -> Any:
                return torch.tensor(float(tokens), requires_grad=True) * 2

            def update(self) -> None:
                self.total += 3

            def counters(self) -> dict[str, float]:
                return {"read": self.total}

        result = train(Counting(), iter([(1, 0), (2, 0), (3, 0)]), 2)
        assert (result.steps, result.loss, result.counted) == (2, 4.0, {"read": 6.0})
        assert result.seconds >= result.settled >= 0
        with pytest.raises(NotImplementedError, match="Counting writes no traces"):
            Counting().trace("somewhere")

    def test_figures_per_step(self) -> None:
        assert a_round(4.0).per_step == 2.0
        assert a_round(4.0).stall_share == 0.25
        assert a_round(disk=(7, 7)).moved == 1.5 * GB  # its own count goes before the kernel's
        assert a_round(counted={}, disk=(6, 4)).moved == 5.0

    def test_the_plain_loop_steps_fp32_masters(self) -> None:
        side, loop = PlainLoop(SMALL.build()), PlainLoop(SMALL.build())
        tokens, targets = next(SMALL.batches())
        side.backward(side.forward(tokens, targets))
        side.update()

        loop.model(tokens, targets).backward()
        grads = [parameter.grad.float() for parameter in loop.parameters]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        assert norm > 1.0  # so that clipping is seen
        for master, grad, stepped, parameter in zip(
            loop.masters, grads, side.masters, side.parameters, strict=True
        ):
            # Adam's first step: lr * g / (|g| + eps), after decay.
            clipped = grad / (norm + 1e-6)
            expected = master * (1 - 1e-4 * 0.01) - 1e-4 * clipped / (clipped.abs() + 1e-8)
            torch.testing.assert_close(stepped, expected, rtol=0, atol=2e-8)
            assert torch.equal(parameter.detach(), stepped.bfloat16())

    def test_ranks_train_on_different_tokens(self) -> None:
        model = replace(SMALL, batch=3)
        (first, targets), (again, _), (other, _) = (next(model.batches(rank)) for rank in (0, 0, 1))
        assert first.shape == (3, model.sequence) and torch.equal(first[:, 1:], targets[:, :-1])
        assert torch.equal(first, again) and not torch.equal(first, other)

    def test_the_kernel_counts_this_process(self) -> None:
        assert 0 < process.resident("VmRSS") <= process.resident("VmHWM")
        with pytest.raises(OSError, match="has no VmNothing"):
            process.resident("VmNothing")
        assert process.age() > 0 and process.cpu_seconds() > 0 and min(process.disk_traffic()) >= 0


class TestRun:
    @pytest.fixture
    def run(self, place: Place) -> Run[None, Side]:
        return Run(Report("known", {}), place, None, Side)

    def test_who_goes_first_rotates_and_the_first_round_is_dropped(self, run: Run[None, Side]) -> None:
        calls: list[str] = []

        def turn(name: str) -> Callable[[], int]:
            return lambda: calls.append(name) or len(calls)  # type: ignore[func-returns-value]

        assert run.alternate(2, {"a": turn("a"), "b": turn("b")}) == {"a": [4, 5], "b": [3, 6]}
        assert calls == ["a", "b", "b", "a", "a", "b"]

    def test_a_side_that_fails_sits_out_and_the_others_go_on(self, run: Run[None, Side]) -> None:
        calls = []

        def good() -> int:
            calls.append("good")
            return len(calls)

        def bad() -> int:
            calls.append("bad")
            if calls.count("bad") == 2:
                raise SideError("bad ended with status 1")
            return 0

        assert run.alternate(3, {"good": good, "bad": bad}) == {"good": [4, 5, 6]}
        assert calls.count("bad") == 2
        assert run.failed == ["bad"]
        assert run.report.skipped == ["bad ended with status 1"]

    def test_a_side_that_does_not_start_is_left_out(
        self, run: Run[None, Side], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Known:
            def __init__(self, spec: Spec, place: Place) -> None:
                if spec.name == "bad":
                    raise SideError("bad does not start")

            def __enter__(self) -> str:
                return "running"

            def __exit__(self, *error: object) -> None:
                ends.append(True)

        ends: list[bool] = []
        run.start = Known  # type: ignore[assignment]
        with run.started([Spec("good", "x"), Spec("bad", "x")]) as sides:
            assert sides == {"good": "running"} and not ends  # type: ignore[comparison-overlap]
        assert ends == [True]
        assert run.report.skipped == ["bad does not start"]

    def test_cases_after_a_failed_one_run_and_those_after_an_interrupt_do_not(
        self, run: Run[None, Side]
    ) -> None:
        ran = []

        def fail(run: Run[None, Side]) -> None:
            raise SideError("dd is not there")

        def interrupt(run: Run[None, Side]) -> None:
            ran.append("interrupt")
            raise KeyboardInterrupt

        command.run_cases(run, [("a", fail), ("b", interrupt), ("c", lambda run: ran.append("c"))])
        assert ran == ["interrupt"]
        assert run.failed == ["a", "b"]
        assert run.report.skipped == ["dd is not there", "case b, and what comes after it: interrupted"]


class TestReport:
    @pytest.fixture
    def report(self) -> Report:
        table = Table("times", ("side", "s"), [("ours | all", "1.0")], ["a note"])
        return Report("known", {"CPU": "one"}, [table], [Verdict("time", "1.0", "at most 2", True)], ["fio"])

    def test_markdown_and_terminal(self, report: Report) -> None:
        text = report.markdown()
        assert text.startswith("# known\n\n- CPU: one\n")
        assert "\n## times\n\n| side | s |\n|---|---|\n| ours \\| all | 1.0 |\n\na note\n" in text
        assert "| time | 1.0 | at most 2 | yes |" in text and text.endswith("## Skipped\n\n- fio\n")
        console = Console(width=200, record=True, file=io.StringIO())
        report.show(console)
        shown = console.export_text()
        assert "ours | all" in shown and "skipped: fio" in shown

    def test_middle(self) -> None:
        assert middle([3.0, 1.0, 2.0]) == "2.000 (1.000-3.000)"

    def test_files(self, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        @dataclass
        class Reading:
            seconds: float

        monkeypatch.setattr(command, "RESULTS", tmp_path)
        options = argparse.Namespace(json=tmp_path / "x.json", markdown=None, save=True)
        command.finish(report, options, "known", lambda: command.readings(report, sides=[Reading(2.0)]))
        raw = json.loads((tmp_path / "x.json").read_text())
        assert list(raw) == ["facts", "skipped", "sides", "goals"]
        assert raw["sides"] == [{"seconds": 2.0}] and "load average at the end" in raw["facts"]
        assert (tmp_path / f"{command.today()}-known.md").read_text() == report.markdown()

    def test_the_exit_status(self, report: Report) -> None:
        assert command.status(report, complete=True) == 0
        assert command.status(report, complete=False) == 2
        report.verdicts.append(Verdict("bytes", "1", "0", False))
        assert command.status(report, complete=True) == 1

    def test_the_machine_is_described(self, tmp_path: Path) -> None:
        facts = machine.describe("numpy", directory=tmp_path)
        assert list(facts)[:3] == ["CPU", "memory", "kernel"]
        assert facts["file system"].partition(" on ")[0] in Path("/proc/filesystems").read_text()
