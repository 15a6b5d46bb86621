"""``tiering plan`` for a cluster that is not here: what its nodes need, what is assumed, and the configuration."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tiering.config.fields import parse_size
from tiering.errors import PlacementError
from tiering.host import machine
from tiering.placement.placement import place
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier
from tiering.planning.choices import _gpu_sizes
from tiering.planning.decoder import decoder, parse_count
from tiering.planning.needs import place_with_needs
from tiering.planning.profiles import PROFILES, like
from tiering.planning.setting import Setting, usual_config
from tiering.planning.sizing import load_of

from .asking import RATES, Plan, answered

# The machine of the ZeRO-Infinity paper.
CLUSTER = ["--gpu=32GiB", "--ranks=512", "--nodes=32"]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "assumed", "layers"),
    [
        ("200B", [], 100),
        ("530B", [], 140),
        ("1T", ["activations"], 172),
        # Plans of 20,000 groups take some seconds.
        pytest.param("20T", ["activations", "tile"], 468, marks=pytest.mark.slow),
    ],
)
def test_sizes_of_the_paper_fit_its_machine(
    size: str, assumed: list[str], layers: int, plan: Plan, tmp_path: Path
) -> None:
    answer = answered(plan, "--params", size, *CLUSTER)
    assert answer["fits"] and answer["ranks_per_node"] == 16
    assert answer["model"].count(f": {layers} layers,") == 1
    assert answer["needed"] == ["host", "nvme"]
    # A DGX-2 has 1.5 TB of memory and 28 TB on its drives.
    assert 16 * answer["budgets"]["host"] < 64 * GIB and 16 * answer["budgets"]["nvme"] < 28e12
    for tier in ("device", "host", "nvme"):
        assert 0 < answer["plan"]["tiers"][tier]["planned"] <= answer["budgets"][tier]
    assert answer["forecast"]["seconds"] > 0
    activations = answer["activations"]
    assert 0 < activations["on_device"] <= activations["room"]
    text = " ".join(answer["assumptions"])
    assert "activation checkpointing" in text and "the rates of dgx2" in text
    configuration = answer["configuration"]
    budgets = {f"{tier.value}_budget" for tier in Tier}
    assert sorted(configuration["tiering"].keys() - budgets) == assumed
    # The configuration, as it is printed, makes the same plan.
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(configuration))
    again = answered(plan, "--params", size, *CLUSTER, "--config", file, "--checkpointing")
    for key in ("budgets", "plan", "activations", "forecast"):
        assert again[key] == answer[key], key
    assert again["needed"] == [] and again["configuration"] is None


def test_what_a_node_needs_is_printed(plan: Plan) -> None:
    code, out, err = plan("--params=200B", *CLUSTER)
    text = " ".join(out.split())
    assert code == 0 and "free space" not in out + err
    assert "Each node needs 6." in text and "of host memory and 87." in text
    assert "--host-budget and --nvme-budget" in text
    assert "With a host budget of 95.12 GiB for each node, a step moves nothing over NVMe." in text
    assert max(map(len, out.splitlines())) <= 80
    configuration = json.loads(out[out.index("{") :])
    assert configuration["fp16"] == {"enabled": True}  # a V100 has no bf16
    assert configuration["zero_optimization"]["offload_param"]["nvme_path"] == "/nvme"


def test_a_budget_that_is_given_is_a_limit(plan: Plan) -> None:
    free = answered(plan, "--params=200B", *CLUSTER)
    limited = answered(plan, "--params=200B", *CLUSTER, "--host-budget=64GiB")
    assert limited["needed"] == ["nvme"] and limited["budgets"]["host"] == 4 * GIB
    assert limited["budgets"]["nvme"] < free["budgets"]["nvme"]
    refused = answered(plan, "--params=200B", *CLUSTER, "--nvme-budget=16GiB", "--host-budget=16GiB")
    assert not refused["fits"] and refused["configuration"]["tiering"]["host_budget"] == "16GiB"
    (larger,) = (
        each["change"] for each in refused["remedies"] if list(each["change"]) == ["tiering.nvme_budget"]
    )
    needed = larger["tiering.nvme_budget"]
    asked = ["--params=200B", *CLUSTER, "--checkpointing", "--host-budget=16GiB"]
    assert plan(*asked, f"--nvme-budget={needed}")[0] == 0
    assert plan(*asked, f"--nvme-budget={int(0.999 * needed)}")[0] == 1


@pytest.mark.slow
def test_nothing_is_assumed_that_was_asked_for(plan: Plan) -> None:
    refused = answered(plan, "--params=200B", *CLUSTER, "--no-checkpointing", "--activations=device")
    assert not refused["fits"] and not any("checkpointing" in each for each in refused["assumptions"])
    assert {"checkpointing": True} in [each["change"] for each in refused["remedies"]]
    assert refused["budgets"]["host"] is None and refused["needed"] == []
    whole = answered(plan, "--params=20T", *CLUSTER, "--tile=0")
    assert not whole["fits"] and "device needs at least" in whole["refusal"]
    assert "offload" not in whole["refusal"]
    (change,) = (each["change"] for each in whole["remedies"])
    assert change == {"tiering.tile": 4 * GIB}
    asked = answered(plan, "--params=200B", *CLUSTER, "--checkpointing", *RATES, "--network=100GB/s")
    assert [each for each in asked["assumptions"] if "checkpointing" in each] == []


@pytest.mark.slow
def test_a_lack_of_swap_space_for_tiles_is_refused_as_such(plan: Plan) -> None:
    answer = answered(plan, "--params=20T", *CLUSTER, "--host-budget=100GiB", "--nvme-budget=1TB")
    assert not answer["fits"] and "nvme needs at least" in answer["refusal"]
    assert any("tiering.nvme_budget" in each["change"] for each in answer["remedies"])


def test_more_gpus_than_here_are_another_machine(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--params=13B", "--gpu=80GiB", "--ranks=8"]
    elsewhere = answered(plan, *asked)
    assert elsewhere["needed"] == ["host", "nvme"] and "the rates of 8xh100" in " ".join(
        elsewhere["assumptions"]
    )
    monkeypatch.setattr(machine, "gpu_count", lambda: 8)
    assert answered(plan, *asked)["needed"] == []


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert machine.gpu_count(tmp_path) == 3


@pytest.mark.parametrize(
    ("memory", "devices", "name"), [(32, 16, "dgx2"), (80, 1, "a100"), (80, 8, "8xh100"), (48, 1, None)]
)
def test_a_machine_with_the_same_gpus(memory: int, devices: int, name: str | None) -> None:
    found = like(memory * GIB, devices)
    assert (None if found is None else found.name) == name


def test_the_network_between_nodes_is_that_of_a_node_for_all_of_its_ranks() -> None:
    dgx2 = PROFILES["dgx2"]
    assert dgx2.network(1) == 150e9
    # Eight adapters of 100 Gb/s.
    assert dgx2.network(32) == 100e9
    assert PROFILES["a100"].network(2) is None


@pytest.mark.parametrize("size", ["7B", "70B"])
def test_needs_are_enough_and_hardly_more(size: str) -> None:
    setting: dict[str, Any] = {"world_size": 16, "local_size": 16, "gpu_memory": 32 * GIB}
    load = load_of(decoder(parse_count(size)), usual_config(Path("/nvme"), world_size=16), Setting(**setting))
    needed = place_with_needs(load, Budgets(16 * GIB, 1 << 60, 1 << 60))
    assert place(load, needed.budgets).contents(Tier.NVME) == needed.contents(Tier.NVME)
    with pytest.raises(PlacementError, match="host needs at least"):
        place(load, Budgets(16 * GIB, needed.budgets.host - GIB, 1 << 60))


def remedied(out: str) -> list[str]:
    """The command that a refusal prints, without its name."""
    (command,) = (line for line in out.splitlines() if line.startswith("tiering plan "))
    return shlex.split(command)[2:]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (
            ["--params=200B", "--gpu=2GiB", "--host-budget=64GiB", "--nvme-budget=8TB"],
            {"--gpu", "--checkpointing"},
        ),
        (
            ["--params=13B", "--host-budget=64MiB", "--device-budget=64MiB", "--nvme-budget=1TB"],
            {"--host-budget"},
        ),
    ],
)
def test_a_refusal_prints_a_command_that_fits(asked: list[str], options: set[str], plan: Plan) -> None:
    code, out, _ = plan(*asked)
    assert code == 1 and "No change was found" not in out
    command = remedied(out)
    assert command[: len(asked)] == asked
    assert {each.partition("=")[0] for each in command[len(asked) :]} >= options
    assert plan(*command)[0] == 0


def test_a_gpu_that_is_far_too_small_is_refused_with_one_that_is_enough(plan: Plan) -> None:
    """And the next smaller of the sizes that are tried is not."""
    asked = ["--params=7B", "--gpu=1MiB"]
    command = remedied(plan(*asked)[1])
    assert plan(*command)[0] == 0
    sizes = [*_gpu_sizes(1 << 20)]
    (size,) = (parse_size(each.removeprefix("--gpu=")) for each in command[len(asked) :] if "--gpu" in each)
    smaller = sizes[sizes.index(size) - 1]
    assert size < 1.3 * smaller
    assert plan(*command, f"--gpu={smaller}")[0] == 1


@pytest.mark.slow
def test_20_trillion_parameters_on_one_rank_are_refused_with_what_they_need(plan: Plan) -> None:
    asked = ["--params=20T", "--gpu=32GiB", "--host-budget=1TiB", "--nvme-budget=28TB"]
    larger, ranks = (each["change"] for each in answered(plan, *asked)["remedies"])
    assert larger["tiering.nvme_budget"] > 28e12 and larger["checkpointing"] and larger["tiering.tile"] >= GIB
    assert plan(*remedied(plan(*asked)[1]))[0] == 0
    run = [*asked, "--checkpointing", "--activations=auto", f"--tile={ranks['tiering.tile']}"]
    for count, code in ((ranks["ranks"], 0), (ranks["ranks"] // 2, 1)):
        assert plan(*run, f"--ranks={count}", f"--nodes={count}")[0] == code
