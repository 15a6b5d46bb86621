"""``tiering plan``: what it answers, what it prints, and that what it offers is what the engine would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiering
from tiering.errors import ConfigError
from tiering.planning.profiles import PROFILES

from .asking import RATES, SMALL, Model, Plan, answered, configured


def test_a_size_is_planned_and_foreseen_without_torch() -> None:
    code = (
        "import sys; from tiering import cli;"
        f" code = cli.main(['plan', '--tbw=1', *{[*SMALL, *RATES]!r}]);"
        " assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for text in (
        "Placement plan",
        "Predicted step",
        "bounded by",
        "tokens per second",
        "hide NVMe",
        "Drive life",
    ):
        assert any(text in line for line in lines), text


@pytest.mark.parametrize("columns", [79, 60, 40, 24])
def test_a_narrow_terminal_cuts_no_figure(plan: Plan, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(out: str) -> set[str]:
        return set(re.findall(r"[\w.,%+]*\d[\w.,%+]*|read|write|device|host|nvme|staging", out))

    _, wide, _ = plan(*SMALL, *RATES, "--tbw", "600")
    assert {"planned", "100.00", "300.00", "2.00"} < set(wide.split())
    monkeypatch.setenv("COLUMNS", str(columns))
    code, narrow, _ = plan(*SMALL, *RATES, "--tbw", "600")
    assert code == 0
    assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow
    assert words(narrow) == words(wide)


def test_json_is_in_bytes_and_seconds(plan: Plan) -> None:
    answer = answered(plan, *SMALL, *RATES, "--tokens", "1000", "--tbw", "600")
    assert (answer["schema"], answer["fits"], answer["refusal"], answer["remedies"]) == (1, True, None, [])
    assert answer["parameters"] == 61_281_920
    assert answer["budgets"] == {"device": 100 << 20, "host": 300 << 20, "nvme": 2 << 30}
    tiers = answer["plan"]["tiers"]
    for tier in ("device", "host", "nvme"):
        assert 0 < tiers[tier]["planned"] == sum(tiers[tier]["contents"].values()) <= answer["budgets"][tier]
    # All state, of 12 bytes an element and its padding, is somewhere.
    state = sum(tiers[tier]["contents"].get("optimizer state", 0) for tier in tiers)
    assert 12 * answer["parameters"] <= state <= 12.1 * answer["parameters"]
    seconds = answer["forecast"]["seconds"]
    assert seconds == pytest.approx(sum(phase["seconds"] for phase in answer["forecast"]["phases"]))
    assert answer["forecast"]["tokens_per_second"] == pytest.approx(1000 / seconds)
    written = answer["plan"]["nvme_written"] * 86_400 / seconds
    assert answer["forecast"]["nvme_written_per_day"] == pytest.approx(written)
    life = answer["forecast"]["drive_life"]
    assert life == pytest.approx(600e12 / written * 86_400)
    for text in ("600TB", "0.6PB"):
        assert (
            answered(plan, *SMALL, *RATES, "--tokens", "1000", "--tbw", text)["forecast"]["drive_life"]
            == life
        )
    assert answer["rates"] == {
        "flops": 1e12,
        "nvme_read": 4e9,
        "nvme_write": 2e9,
        "optimizer": 1e9,
        "gradients": 8e9,
        "host_copy": 1e10,
        "device_link": 1.6e10,
    }


def test_a_named_model_is_planned_with_adapters(plan: Plan) -> None:
    asked = [
        "--model=llama-3-8b",
        *SMALL[2:],
        "--device-budget=2GiB",
        "--host-budget=8GiB",
        "--nvme-budget=32GiB",
    ]
    answers = {base: answered(plan, *asked, "--lora=8", f"--base={base}") for base in ("bf16", "nf4")}
    for answer in answers.values():
        assert answer["model"].startswith("llama-3-8b, a decoder of 8.03B parameters")
        assert "adapters of rank 8 on all linear layers" in answer["model"]
        assert answer["plan"]["nvme_written"] == 0
    assert answers["bf16"]["plan"]["nvme_read"] > 0 == answers["nf4"]["plan"]["nvme_read"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base=nf4"], "--base needs --lora RANK"),
        (["--lora-modules=q_proj"], "--lora-modules needs --lora RANK"),
        (
            ["--lora=8", "--base=int4"],
            "unknown format 'int4' of the frozen model; use one of bf16, nf4, int8, fp8",
        ),
        (["--lora=8", "--lora-modules=q_proj,qkv"], "no linear layer of the model is called 'qkv'"),
        (
            ["--gpu=1GiB", "--device-budget=2GiB"],
            "device_budget is 2.00 GiB for each GPU, which has 1.00 GiB",
        ),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(plan: Plan, options: list[str], message: str) -> None:
    code, _, error = plan(*SMALL, *options)
    assert code == 2 and message in error


def test_a_plan_has_the_activations_of_a_known_shape(plan: Plan) -> None:
    assert answered(plan, *SMALL, *RATES, "--tokens=65536")["not_counted"] == []
    _, out, _ = plan(*SMALL, *RATES)
    # 4 blocks of 4,096 tokens.
    assert "Activations of a micro-batch: 1.94 GiB on the device: 4 blocks 464.44 MiB" in " ".join(
        out.split()
    )


def test_a_size_without_its_unit_is_refused(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--gpu", "--host-budget"):
        with pytest.raises(SystemExit) as refused:
            plan(*SMALL, option, "24")
        assert refused.value.code == 2
        assert "24 is 24 bytes; did you mean 24GiB?" in capsys.readouterr().err


def test_a_budget_below_a_mebibyte_that_is_suggested_is_accepted(plan: Plan) -> None:
    """The device budget of a run on the CPU has persistent parameters only."""
    asked = [*SMALL, "--host-budget=1GiB", "--nvme-budget=16GiB"]
    told = answered(plan, *asked, "--device-budget=4KiB")
    (text,) = (
        offer["text"] for offer in told["remedies"] if list(offer["change"]) == ["tiering.device_budget"]
    )
    size = text.removeprefix("device_budget of ").replace(" ", "")
    assert size.endswith("KiB") and plan(*asked, f"--device-budget={size}")[0] == 0


def test_a_rate_that_is_missing_is_named_as_its_option(plan: Plan) -> None:
    message = answered(plan, *SMALL)["unforeseen"]
    assert re.search(
        r"needs the rate '(\w+)': set it \(tiering plan --[a-z-]+\), measure it \(--measure DIR\)", message
    )


def rows_of_steps(out: str) -> dict[str, tuple[float, str]]:
    lines = out.partition("Predicted step by tiering.step")[2].splitlines()
    rows = (re.fullmatch(r"(after|deferred|in_backward) +(\S+) *(.*?) *", line) for line in lines)
    return {row[1]: (float(row[2]), row[3]) for row in rows if row}


def test_each_step_has_a_line_and_auto_takes_one(plan: Plan, tmp_path: Path) -> None:
    def planned(**tiers: object) -> tuple[dict[str, Any], dict[str, tuple[float, str]]]:
        file = tmp_path / "ds_config.json"
        content = configured(tmp_path, fits=True, cache_in_host=False, **tiers) | {
            "gradient_clipping": tiers.get("clip", 1.0)
        }
        content["tiering"].pop("clip", None)
        budgets = {f"{tier}_budget": f"{size}MiB" for tier, size in (("device", 100), ("host", 300))}
        content["tiering"] |= budgets | {"nvme_budget": "4GiB"}
        file.write_text(json.dumps(content))
        arguments = ["--params=60M", f"--config={file}", *RATES]
        return answered(plan, *arguments), rows_of_steps(plan(*arguments)[1])

    answer, rows = planned()
    seconds = answer["forecast"]["seconds_by_step"]
    assert rows == {
        "after": (pytest.approx(seconds["after"], rel=1e-2), "this plan"),
        "deferred": (pytest.approx(seconds["deferred"], rel=1e-2), 'taken by "auto"'),
        "in_backward": (
            pytest.approx(seconds["in_backward"], rel=1e-2),
            "refused with gradient_clipping 1",
        ),
    }
    assert seconds["after"] == answer["forecast"]["seconds"] > 1.05 * seconds["deferred"]
    assert (answer["step"], answer["auto_step"]) == ("after", "deferred")
    for step in ("deferred", "auto"):
        answer, rows = planned(step=step)
        assert answer["step"] == "deferred"
        assert answer["forecast"]["seconds"] == answer["forecast"]["seconds_by_step"]["deferred"]
        assert answer["forecast"]["seconds_by_step"] == seconds
        assert rows["deferred"][1] == 'this plan, taken by "auto"'
    # What cannot be taken back is only taken if it is asked for.
    answer, rows = planned(step="auto", clip=0.0)
    assert (answer["step"], rows["in_backward"][1]) == ("deferred", "")
    answer, rows = planned(step="in_backward", clip=0.0)
    assert answer["forecast"]["seconds_by_step"] == pytest.approx(seconds)
    assert (answer["step"], rows["in_backward"][1]) == ("in_backward", "this plan")
    answer, rows = planned(step="auto", swap_versions=2)
    assert (answer["step"], rows["in_backward"][1]) == ("deferred", "")
    answer, rows = planned(step="auto", swap_versions=2, clip=0.0)
    assert (answer["step"], rows["in_backward"][1]) == ("in_backward", 'this plan, taken by "auto"')


def test_the_names_in_json_are_those_of_its_schema(plan: Plan) -> None:
    """Programs read them: one that goes, or changes its meaning, makes another schema."""
    answer = answered(plan, *SMALL, *RATES)
    assert answer["schema_version"] == answer["schema"] == 1
    assert {name: sorted(answer[name]) for name in ("budgets", "plan", "forecast")} == {
        "budgets": ["device", "host", "nvme"],
        "plan": [
            "in_place",
            "nvme_moved_by_state",
            "nvme_read",
            "nvme_written",
            "sent",
            "staging",
            "tiers",
            "updated",
        ],
        "forecast": [
            "bound",
            "drive_life",
            "efficiency",
            "nvme_written_per_day",
            "phases",
            "seconds",
            "seconds_by_step",
            "tokens",
            "tokens_per_second",
            "tokens_that_hide",
        ],
    }
    assert [phase["name"] for phase in answer["forecast"]["phases"]] == ["forward", "backward", "step"]
    assert [sorted(phase) for phase in answer["forecast"]["phases"]] == 3 * [
        ["bound", "busy", "name", "seconds", "stalled"]
    ]
    assert sorted(answer.keys() - {"schema_version", "schema", "budgets", "plan", "forecast"}) == [
        "activations",
        "assumptions",
        "auto_step",
        "configuration",
        "fits",
        "gpu_memory",
        "micro_batch_tokens",
        "micro_batches",
        "model",
        "needed",
        "not_counted",
        "parameters",
        "ranks",
        "ranks_per_node",
        "rates",
        "refusal",
        "remedies",
        "stage",
        "state",
        "step",
        "unforeseen",
    ]


def test_attention_takes_its_time_by_the_length_of_sequences(plan: Plan) -> None:
    """4 layers of 640: 2 operations for each element of hidden, layer and token before, three times with backward."""
    long, short = (
        answered(plan, *SMALL, *RATES, "--tokens", "4096", "--sequence", length)
        for length in ("4096", "1024")
    )
    computed = [
        sum(phase["busy"].get("compute", 0) for phase in answer["forecast"]["phases"])
        for answer in (long, short)
    ]
    assert computed[0] - computed[1] == pytest.approx(3 * 2 * 4 * 640 * (4096 - 1024) * 4096 / 1e12)
    assert answered(plan, *SMALL, *RATES, "--tokens", "4096") == long


def test_a_missing_rate_is_told_and_the_plan_stands(plan: Plan) -> None:
    code, out, _ = plan(*SMALL, "--nvme-read", "4GB/s")
    assert code == 0
    assert "No step time: " in out
    assert "'flops'" in out
    answer = answered(plan, *SMALL)
    assert answer["forecast"] is None
    assert "'flops'" in answer["unforeseen"]


def test_a_configuration_is_honoured_and_the_command_line_goes_before_it(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    offload = {"device": "cpu"}
    config.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "optimizer": {"type": "Lion"},
                "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
                "tiering": {"host_budget": "4GiB", "device_budget": "1GiB"},
            }
        )
    )
    answer = answered(plan, "--params", "60M", "--config", config)
    assert (answer["micro_batches"], answer["state"], answer["budgets"]["host"]) == (2, "fp32", 4 << 30)
    state_bytes = answer["plan"]["tiers"]["host"]["contents"]["optimizer state"]
    assert state_bytes == pytest.approx(8 * answer["parameters"], rel=0.01)  # a master and one moment
    answer = answered(
        plan,
        "--params",
        "60M",
        "--config",
        config,
        "--micro-batches",
        "3",
        "--state",
        "bf16",
        "--host-budget",
        "2GiB",
    )
    assert (answer["micro_batches"], answer["state"], answer["budgets"]["host"]) == (3, "bf16", 2 << 30)


def test_an_optimizer_that_nobody_names_is_assumed_to_be_adamw(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_batch_size": 1, "bf16": {"enabled": True}}))
    code, out, err = plan("--params", "60M", "--config", config, "--device-budget", "4GiB", "--json")
    assert code == 0
    assert "names no optimizer; AdamW is assumed" in err
    answer = json.loads(out)
    state_bytes = answer["plan"]["tiers"]["device"]["contents"]["optimizer state"]
    assert state_bytes == pytest.approx(12 * answer["parameters"], rel=0.01)


def test_a_swap_directory_that_is_not_here_needs_a_budget(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    elsewhere = configured(tmp_path / "elsewhere", fits=True)
    elsewhere["tiering"] |= {"nvme_budget": "auto", "host_budget": "2GiB", "device_budget": "1GiB"}
    config.write_text(json.dumps(elsewhere))
    code, _, err = plan("--params", "60M", "--config", config)
    assert code == 2
    assert "elsewhere does not exist" in err
    assert "to plan for another machine, give --nvme-budget" in err
    assert plan("--params", "60M", "--config", config, "--nvme-budget", "2GiB")[0] == 0


def test_ranks_that_do_not_divide_over_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="6 ranks with 4 per node is not possible"):
        tiering.plan_for(
            model=Model(), config=configured(tmp_path, fits=True), world_size=6, ranks_per_node=4
        )


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"sequence": -1}, {"gpu_memory": 0}, {"endurance": 0.0}])
def test_a_setting_of_nothing_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be above 0"):
        tiering.plan_for(model=Model(), config=configured(tmp_path, fits=True), **wrong)


def test_ranks_share_the_budgets_of_their_node(plan: Plan) -> None:
    answer = answered(plan, *SMALL, "--ranks", "4", "--nodes", "2")
    assert (answer["ranks"], answer["ranks_per_node"]) == (4, 2)
    assert answer["budgets"] == {"device": 50 << 20, "host": 150 << 20, "nvme": 1 << 30}
    code, _, err = plan(*SMALL, "--ranks", "4", "--nodes", "3")
    assert code == 2
    assert "4 ranks cannot be divided over 3 nodes" in err
    _, _, err = plan(*SMALL, "--ranks", "1", "--nodes", "2")
    assert "1 rank cannot be divided over 2 nodes" in err


def test_a_profile_brings_budgets_and_rates(plan: Plan) -> None:
    answer = answered(
        plan, "--params", "13B", "--profile", "rtx4090", "--checkpointing", "--nvme-read", "1GB/s"
    )
    profile, counted = PROFILES["rtx4090"], answer["activations"]
    inside = counted["blocks"] + max(counted["block"], counted["loss"] + counted["beside_loss"])
    # Two gradients of the largest matrix in bf16, of 5,120 x 13,824 or of the embedding.
    gradients = 2 * 2 * 32_000 * 5120
    assert answer["budgets"] == {
        "device": (profile.device.memory_bytes - inside - gradients) >> 20 << 20,
        "host": int(0.8 * profile.host_bytes),
        "nvme": int(0.95 * profile.nvme_bytes),
    }
    assert answer["rates"]["flops"] == profile.device.flops
    assert answer["rates"]["nvme_read"] == 1e9
    assert answer["forecast"]["drive_life"] > 0
    assert answer["gpu_memory"] == profile.device.memory_bytes
    code, _, err = plan("--params", "13B", "--profile", "abacus")
    assert code == 2
    assert "unknown profile 'abacus'; use one of rtx4090," in err


def test_a_profile_does_not_know_the_network_between_nodes(plan: Plan) -> None:
    ranks = ["--params", "7B", "--profile", "a100", "--ranks", "2"]
    within = answered(plan, *ranks)
    assert within["rates"]["network"] == PROFILES["a100"].device.network
    between = answered(plan, *ranks, "--nodes", "2")
    assert "network" not in between["rates"]
    assert "'network'" in between["unforeseen"]
    answer = answered(plan, *ranks, "--nodes", "2", "--network", "25GB/s")
    assert answer["rates"]["network"] == 25e9
    assert answer["forecast"]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "7Q"], "invalid number of parameters '7Q'"),
        (["--params", "1M"], "no decoder of 1.00M parameters"),
        (["--params", "7B", "--host-budget", "7 parsecs"], "unknown unit 'parsecs'"),
        (["--params", "7B", "--flops", "fast"], "must be a number above 0"),
        (["--params", "7B", "--flops", "0"], "must be a number above 0"),
        (["--params", "7B", "--tokens", "0"], "must be at least 1, not 0"),
        (["--params", "7B", "--block-rows", "few"], "must be at least 1, not few"),
        (["--params", "7B", "--tbw", "600TBW"], "unknown unit 'TBW' in size '600TBW'; did you mean 'TB'?"),
        (["--params", "7B", "--tbw", "0"], "endurance is 0; it must be above 0"),
        (["--params", "7B", "--gpu", "0"], "gpu_memory is 0; it must be above 0"),
        (["--params", "7B", "--save-rates", "x"], "--save-rates needs --measure DIR"),
        (["--params", "7B", "--measure-again"], "--measure-again needs --measure DIR"),
        (["--params", "7B", "--model", "x"], "not allowed with"),
        ([], "one of the arguments --params --model is required"),
        (["--params", "7B", "--state", "fp8"], "tiering.state: Input should be 'fp32'"),
        (["--params", "7B", "--config", "nowhere.json"], "cannot read the configuration file nowhere.json"),
        (["--params", "7B", "--rates", "nowhere.json"], "nowhere.json"),
        (["--model", "nowhere"], "nowhere does not exist; name a transformers config.json"),
    ],
)
def test_a_wrong_question_is_exit_code_2(
    arguments: list[str], words: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, _, err = plan(*arguments)
    except SystemExit as stop:  # argparse
        code, err = stop.code, capsys.readouterr().err
    assert code == 2
    assert words in " ".join(err.split())
