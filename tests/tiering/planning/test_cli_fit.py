"""``tiering plan`` for what does not fit: each remedy that it offers does make it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiering.placement import budgets as budgets_of_this_machine

from .asking import Plan, answered

ALL_IN: dict[str, dict[str, Any]] = {
    tier: {"stage": 3, "offload_param": tier, "offload_optimizer": tier} for tier in ("cpu", "nvme")
}


def test_what_does_not_fit_says_what_would_and_that_does(plan: Plan) -> None:
    tight = ["--params", "60M", "--device-budget", "100MiB", "--nvme-budget", "500MiB"]
    code, out, _ = plan(*tight, "--host-budget", "300MiB")
    assert code == 1
    assert "Does not fit. [TIER-PLAN] nvme needs" in out
    assert "  - state 'split+bf16'" in out
    answer = answered(plan, *tight, "--host-budget", "300MiB")
    offers = {tuple(offer["change"]): offer for offer in answer["remedies"]}
    assert answer["plan"] is None
    more = offers[("tiering.nvme_budget",)]["change"]["tiering.nvme_budget"]
    assert plan(*tight, "--host-budget", "300MiB", "--nvme-budget", more)[0] == 0
    assert plan(*tight, "--host-budget", "300MiB", "--nvme-budget", more - (1 << 20))[0] == 1
    text = offers[("tiering.host_budget",)]["text"]
    assert plan(*tight, "--host-budget", text.removeprefix("host_budget of "))[0] == 0
    assert plan(*tight, "--host-budget", "300MiB", "--state", "split+bf16")[0] == 0


@pytest.mark.parametrize(
    ("zero", "budgets", "ranks", "micro_batches", "gpu", "offered"),
    [
        ({"stage": 0}, ("600MiB", "300MiB", 0), 1, 1, "2GiB", "state stage device_budget"),
        ({"stage": 1}, ("2GiB", "400MiB", 0), 4, 2, "1GiB", "stage device_budget"),
        ({"stage": 2, "offload_optimizer": "cpu"}, ("1GiB", "700MiB", 0), 2, 4, "1GiB", "device ranks"),
        (ALL_IN["cpu"], ("1GiB", "1000MiB", 0), 1, 2, None, "grad_accum_dtype state host_budget"),
        (ALL_IN["nvme"], ("1GiB", "500MiB", "300MiB"), 1, 3, "2GiB", "host_budget nvme_budget ranks"),
        (ALL_IN["nvme"], ("auto", "300MiB", "300MiB"), 1, 1, None, "host_budget device_budget nvme_budget"),
        (ALL_IN["cpu"], ("60MiB", "auto", 0), 1, 1, None, "host_budget state"),
    ],
)
def test_every_remedy_put_into_the_configuration_makes_it_fit(
    zero: dict[str, Any],
    budgets: tuple[str | int, ...],
    ranks: int,
    micro_batches: int,
    gpu: str | None,
    offered: str,
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets_of_this_machine, "host_memory", lambda: (1 << 30, 0))

    def answer_to(change: dict[str, Any]) -> dict[str, Any]:
        """The plan of the configuration with ``change``."""
        sections: dict[str, dict[str, Any]] = {
            "zero_optimization": {
                key: {"device": value} if isinstance(value, str) else value for key, value in zero.items()
            },
            "tiering": dict(zip(("device_budget", "host_budget", "nvme_budget"), budgets, strict=True)),
        }
        for key, value in change.items():
            section: dict[str, Any] = sections
            for each in key.split(".")[:-1]:
                section = section.setdefault(each, {})
            section[key.rpartition(".")[2]] = value
        for section in sections["zero_optimization"].values():
            if isinstance(section, dict) and section.get("device") == "nvme":
                section["nvme_path"] = str(tmp_path)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": sections["zero_optimization"],
            "tiering": sections["tiering"],
        }
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(config))
        rank_count = change.get("ranks", ranks)
        nodes = rank_count // ranks  # further ranks have budgets of their own, on nodes like the first
        arguments = ["--params", "60M", "--config", file, "--ranks", rank_count, "--nodes", nodes]
        arguments += ["--tokens", change.get("tokens", 256)]
        arguments += ["--checkpointing"] if "checkpointing" in change else []
        arguments += ["--chunked-loss"] if "loss_chunk" in change else []
        return answered(plan, *arguments, *(["--gpu", gpu] if gpu else []))

    answer = answer_to({})
    assert not answer["fits"]
    changed = {key.rpartition(".")[2] for offer in answer["remedies"] for key in offer["change"]}
    assert changed >= set(offered.split())
    for offer in answer["remedies"]:
        assert answer_to(offer["change"])["fits"], offer["text"]


def test_no_more_is_offered_than_a_gpu_has(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    on_gpu = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    config.write_text(
        json.dumps(on_gpu | {"tiering": {"state": "split+bf16", "device_budget": "256MiB", "host_budget": 0}})
    )
    asked = ["--params", "60M", "--tokens", "256"]
    small, large = (answered(plan, *asked, "--config", config, "--gpu", size) for size in ("300MiB", "1GiB"))
    assert not small["fits"]
    assert [list(each["change"]) for each in small["remedies"]] == [["gpu", "tiering.device_budget"]]
    (raised,) = (each for each in large["remedies"] if list(each["change"]) == ["tiering.device_budget"])
    assert 256 << 20 == large["budgets"]["device"] < raised["change"]["tiering.device_budget"] <= 1 << 30
