from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tests.zero3.deepspeed_tables import CASES, UPDATES, make_optimizer, rates_and_momenta
from tiering.config import ds_config
from tiering.errors import ConfigError
from zero3.optimizer.schedulers import SCHEDULES, OneCycle, WarmupCosineLR, WarmupLR, from_config

DOCUMENT = json.loads((Path(__file__).parents[1] / "deepspeed_tables.json").read_text(encoding="utf-8"))
TABLES: list[dict[str, Any]] = DOCUMENT["schedules"]


def make(kind: str, optimizer: Optimizer, params: dict[str, Any]) -> LRScheduler:
    """A schedule by way of a configuration file."""
    settings = {"train_batch_size": 1, "scheduler": {"type": kind, "params": params}}
    config = ds_config.load(settings)[0].scheduler
    assert config is not None
    return from_config(config, optimizer)


def update(optimizer: Optimizer, scheduler: LRScheduler) -> list[list[Any]]:
    """One update with no gradient, and what the schedule sets after it."""
    optimizer.step()
    scheduler.step()
    return json.loads(json.dumps(rates_and_momenta(optimizer)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table['type']}-{json.dumps(table['params'])}")
def test_every_value_is_deepspeeds(table: dict[str, Any]) -> None:
    optimizer = make_optimizer(table["optimizer"], table["groups"])
    scheduler = make(table["type"], optimizer, table["params"])
    assert json.loads(json.dumps(rates_and_momenta(optimizer))) == table["values"][0]
    for expected in table["values"][1:]:
        assert update(optimizer, scheduler) == expected
        assert scheduler.get_last_lr() == [rate for rate, _ in expected]


def test_the_tables_are_of_these_cases() -> None:
    cases = [(table["type"], table["optimizer"], table["groups"], table["params"]) for table in TABLES]
    assert cases == [tuple(case) for case in CASES]
    assert {case[0] for case in CASES} == set(SCHEDULES)
    assert all(len(table["values"]) == UPDATES + 1 for table in TABLES)
    assert DOCUMENT["deepspeed"] == "0.19.8"


@pytest.mark.parametrize("after", [0, 1, 5, 13])
@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_a_resumed_schedule_goes_on(kind: str, after: int) -> None:
    table = next(table for table in TABLES if table["type"] == kind and table["groups"] == 2)
    optimizer = make_optimizer(table["optimizer"], 2)
    scheduler = make(kind, optimizer, table["params"])
    for _ in range(after):
        update(optimizer, scheduler)
    state = json.loads(json.dumps(scheduler.state_dict()))

    fresh = make_optimizer(table["optimizer"], 2)
    resumed = make(kind, fresh, table["params"])
    resumed.load_state_dict(state)
    assert json.loads(json.dumps(rates_and_momenta(fresh))) == table["values"][after]
    assert resumed.get_last_lr() == [rate for rate, _ in table["values"][after]]
    for expected in table["values"][after + 1 :]:
        assert update(fresh, resumed) == expected


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_a_schedule_is_told_which_update_has_been(kind: str) -> None:
    """As scripts do that count updates themselves, by DeepSpeed's names of the argument."""
    table = next(table for table in TABLES if table["type"] == kind and table["groups"] == 2)
    name = "batch_iteration" if kind in ("LRRangeTest", "OneCycle") else "last_batch_iteration"
    optimizer = make_optimizer(table["optimizer"], 2)
    scheduler: Any = make(kind, optimizer, table["params"])
    for number, arguments in ((11, {name: 11}), (3, {name: 3}), (4, {})):
        optimizer.step()
        scheduler.step(**arguments)
        assert json.loads(json.dumps(rates_and_momenta(optimizer))) == table["values"][number + 1]
        assert scheduler.state_dict()["last_batch_iteration"] == number


def test_the_goal_of_a_resumed_warmup_is_what_the_optimizer_began_with() -> None:
    optimizer = make_optimizer("AdamW", 1)
    scheduler = WarmupLR(optimizer, warmup_num_steps=4)
    for _ in range(3):
        update(optimizer, scheduler)
    # As after loading an optimizer's state: the rate in the group is one of the middle of the warmup.
    fresh = make_optimizer("AdamW", 1)
    fresh.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    resumed = WarmupLR(fresh, warmup_num_steps=4)
    resumed.load_state_dict(scheduler.state_dict())
    assert [update(fresh, resumed)[0][0] for _ in range(3)] == [0.003, 0.003, 0.003]


def test_a_state_of_deepspeed_can_be_loaded() -> None:
    optimizer = make_optimizer("AdamW", 1)
    scheduler = WarmupCosineLR(optimizer, 17, warmup_num_steps=7)
    scheduler.load_state_dict({"last_batch_iteration": 9})
    table = next(table for table in TABLES if table["type"] == "WarmupCosineLR")
    assert table["params"] == {"total_num_steps": 17, "warmup_num_steps": 7}
    assert rates_and_momenta(optimizer)[0][0] == table["values"][10][0][0]


def test_a_resumed_run_follows_a_changed_configuration() -> None:
    optimizer = make_optimizer("AdamW", 1)
    short = make("WarmupDecayLR", optimizer, {"total_num_steps": 10, "warmup_num_steps": 2})
    for _ in range(6):
        update(optimizer, short)
    fresh = make_optimizer("AdamW", 1)
    longer = make("WarmupDecayLR", fresh, {"total_num_steps": 18, "warmup_num_steps": 2})
    longer.load_state_dict(short.state_dict())
    assert rates_and_momenta(fresh)[0][0] == 0.001 * ((18 - 5) / 16)


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = make("WarmupLR", optimizer, {"warmup_num_steps": 4, "warmup_type": "linear"})
    for _ in range(3):
        update_tensor(optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def update_tensor(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize(
    ("params", "momentum", "expected"),
    [
        ({}, 0.9, [0.9, 0.9, 0.9]),
        ({"cycle_momentum": True}, 0.9, [0.8, 0.9 - (0.9 - 0.8) * 0.5, 0.9 - (0.9 - 0.8)]),
        ({"cycle_momentum": True}, 0.0, [0.0, 0.0, 0.0]),
        ({"cycle_momentum": False}, 0.9, [0.9, 0.9, 0.9]),
    ],
)
def test_one_cycle_cycles_the_momentum_of_sgd_when_told_to(
    params: dict[str, Any], momentum: float, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=momentum)
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    with caplog.at_level(logging.WARNING):
        scheduler = make("OneCycle", optimizer, cycle | params)
    unchanged = not params or not momentum
    assert ("OneCycle leaves the momentum as it is: SGD has no betas" in caplog.text) == unchanged
    momenta = [optimizer.param_groups[0]["momentum"]]
    for _ in range(2):
        update_tensor(optimizer, scheduler)
        momenta.append(optimizer.param_groups[0]["momentum"])
    assert momenta == expected


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2, 0.3]}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": [0.1]}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": [0.1]}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": [0.1, 0.2, 0.3]}),
        ("LRRangeTest", {"lr_range_test_min_lr": []}),
    ],
)
def test_a_list_has_one_value_per_param_group(kind: str, params: dict[str, Any]) -> None:
    optimizer = make_optimizer("AdamW", 2)
    with pytest.raises(
        ConfigError, match=r"scheduler\.params\.\w+ lists [013] values, .* has 2 param groups"
    ):
        make(kind, optimizer, params)
    assert [group["lr"] for group in optimizer.param_groups] == [0.003, 0.006]


def test_wrong_parameters_are_refused_without_a_configuration_too() -> None:
    optimizer = make_optimizer("AdamW", 1)
    with pytest.raises(ConfigError, match="warmup_num_steps must be a whole number of 0 or more, not -1"):
        WarmupLR(optimizer, warmup_num_steps=-1)
    with pytest.raises(ConfigError, match="'log' or 'linear', not 'cosine'"):
        WarmupLR(optimizer, warmup_type="cosine")
    with pytest.raises(ConfigError, match="not 0 and None"):
        OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=0)
    with pytest.raises(ConfigError, match="not 1 and -1"):
        OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=1, cycle_second_step_size=-1)


def test_an_end_before_the_end_of_the_warmup_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make("WarmupDecayLR", make_optimizer("AdamW", 1), {"total_num_steps": 6, "warmup_num_steps": 7})
    assert "ends after 6 updates, before its warmup of 7" in caplog.text
