"""What bench_plan.py tells of a plan, when it measures, what it concludes, and that everything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from frame.reference_model import Model
from frame.report import Report
from frame.side import Place, SideError, Spec
from frame.training import Round
from plan import predictions, rows
from step import sides
from step.ours import configuration

import tiering
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier
from tiering.planning.rates import Rates

SMALL = Model(width=128, layers=2)
KNOWN = Rates(
    nvme_read=1e9, nvme_write=1e9, nvme_mixed=1e9, optimizer=1e9, gradients=1e9, flops=1e12, host_copy=1e9
)


@pytest.fixture
def streamed() -> Spec:
    settings = {"cache_in_host": False, "host_budget": "8MiB", "device_budget": "4MiB"}
    return sides.on_nvme(SMALL, "streamed", settings)


def test_the_plan_of_a_model_on_meta_is_that_of_the_engine(streamed: Spec, tmp_path: Path) -> None:
    predicted = predictions.plan_of(streamed, tmp_path)
    config = configuration({"directory": str(tmp_path), **streamed.settings})
    with tiering.initialize(model=SMALL.build(), config=config).engine as engine:
        real: Plan = engine.plan
    assert replace(predicted, budgets=real.budgets) == real  # "auto" is what was free then
    assert real.total(Tier.NVME) > 0


def test_a_side_in_memory_needs_no_directory(tmp_path: Path) -> None:
    plan = predictions.plan_of(sides.in_memory(SMALL, "in RAM"), tmp_path)
    assert plan.nvme_traffic() == (0, 0)


def test_a_side_that_does_not_fit_says_so(streamed: Spec, tmp_path: Path) -> None:
    streamed.settings["tiering"]["device_budget"] = "4KiB"
    with pytest.raises(SideError, match=r"streamed does not fit: .*device needs at least"):
        predictions.plan_of(streamed, tmp_path)


def test_rates_are_those_of_the_plans_format(
    streamed: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(predictions.device_rates, "measure", lambda device, **kinds: Rates(flops=3.0))

    def measure(directories: list[Path], **kinds: Any) -> Rates:
        arguments.update(kinds, directories=directories)
        return Rates(nvme_read=2.0)

    monkeypatch.setattr(predictions.measure, "measure", measure)
    streamed.settings["tiering"]["state"] = "split+bf16"
    machine = predictions.Machine(predictions.plan_of(streamed, tmp_path), (tmp_path,), SMALL, 0.5, 1 << 20)
    assert machine.measure() == Rates(nvme_read=2.0, flops=3.0)
    assert arguments == {
        "directories": (tmp_path,),
        "state_format": "split+bf16",
        "state_tensors": 2,
        "grad_itemsize": 2,
        "seconds": 0.5,
        "file_bytes": 1 << 20,
    }


def a_round(seconds: float, plan: Plan, steps: int = 2) -> Round:
    read, written = plan.nvme_traffic()
    return Round(
        steps=steps,
        seconds=seconds,
        forward=0.1,
        backward=0.2,
        update=0.3,
        settled=0.1,
        loss=5.0,
        peak=1,
        disk=(0, 0),
        counted={"read": steps * read, "written": steps * written},
        age=1.0,
    )


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: a side whose every step takes a second, on a machine that gets faster."""
    names: list[str] = []

    class Alone:
        facts: dict[str, object] = {}  # noqa: RUF012 - nobody changes it

        def __init__(self, spec: Spec, place: Place) -> None:
            self._plan = predictions.plan_of(spec, place.directory)

        def train(self, steps: int) -> Round:
            names.append("run")
            return a_round(float(steps), self._plan, steps)

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            names.append("end")

    def measure(self: predictions.Machine) -> Rates:
        names.append("rates")
        faster = float(names.count("rates"))
        return Rates(**{name: faster * rate for name, rate in KNOWN.as_dict().items()})

    monkeypatch.setattr(rows, "Side", Alone)
    monkeypatch.setattr(predictions.Machine, "measure", measure)
    return names


def test_rates_are_measured_before_and_after_each_round(
    streamed: Spec, tmp_path: Path, events: list[str]
) -> None:
    row = rows.measure(
        streamed,
        Place(tmp_path, 1, 60),
        rounds=2,
        steps=3,
        seconds=0.1,
        file_bytes=1,
        say=lambda message: None,
    )
    assert events == ["run", "rates", "run", "rates", "run", "rates", "end"]
    assert row.real == [1.0, 1.0]
    slowest = predictions.forecast(row.plan, KNOWN, tokens=SMALL.sequence).seconds
    expected = [(slowest + slowest / 2) / 2, (slowest / 2 + slowest / 3) / 2]
    assert row.predicted == pytest.approx(expected)
    assert row.ratios == pytest.approx(expected)


def concluded(plan: Plan, *seconds: float, **counted: float) -> tuple[Report, bool, bool]:
    """A report of rounds that took so much of what was predicted, and whether time and bytes are as they should."""
    predicted = predictions.forecast(plan, KNOWN, tokens=SMALL.sequence)
    rounds = [a_round(2 * share * predicted.seconds, plan) for share in seconds]
    rounds = [replace(round_, counted={**round_.counted, **counted}) for round_ in rounds]
    times = len(rounds) + 1
    row = rows.Row("some", plan, {}, rounds, [KNOWN] * times, [predicted] * times)
    report = Report("title", {})
    rows.conclude(report, [row])
    time, moved = report.verdicts
    return report, time.holds, moved.holds


def test_what_is_concluded(streamed: Spec, tmp_path: Path) -> None:
    plan = predictions.plan_of(streamed, tmp_path)
    report, near, exact = concluded(plan, 1.0, 1.1, 1.2)
    assert near and exact
    assert [table.rows[0][0] for table in report.tables] == ["some"] * 3
    assert report.tables[0].rows[0][4] == "0.91 (0.83-1.00)"
    assert report.tables[2].rows[0][1:3] == ("1.00 (1.00-1.00)", "1.00 (1.00-1.00)")
    assert "some" in report.markdown()
    assert concluded(plan, 1.3, 1.4)[1] is False  # predicted too short
    assert concluded(plan, 0.8, 0.8)[1] is False  # and too long
    assert concluded(plan, 1.0, read=1.0)[2] is False


@pytest.mark.slow
def test_everything_runs(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    quick = ("--quick", "--rounds", "1", "--steps", "2", "--seconds", "0.05", "--threads", "1")
    status, report, raw, output = command("bench_plan.py", *quick)
    assert status in (0, 1), output
    names = [row["name"] for row in raw]
    assert names == ["all in RAM", "NVMe, host budget 30MiB", "NVMe, nothing cached"]
    assert all(len(row["rates"]) == 2 and len(row["rounds"]) == 1 for row in raw)
    assert "nvme_mixed" in raw[1]["rates"][0] and "nvme_mixed" not in raw[0]["rates"][0]
    assert report.count("bytes per step: ") == 3 and "predicted" in output
    lines = [line for line in report.splitlines() if line.startswith("| bytes per step")]
    assert all(line.endswith("| yes |") for line in lines)
