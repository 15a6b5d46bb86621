from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tiering.config import TieringConfig
from tiering.ds_config import Entry, Report, Verdict, examine, load
from tiering.ds_keys import KEYS, SECTIONS
from tiering.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3},
}

ZERO3_NVME: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e8,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
    "tensorboard": {"enabled": True, "output_path": "logs"},
    "elasticity": {"enabled": False},
    "tiering": {"host_budget": "256MiB", "cache_in_host": False},
}


def changed(path: str, value: Any, base: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    """A copy of ``base`` with ``value`` at the dotted ``path``."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    node = copy
    *sections, name = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    return copy


def without(path: str, base: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    copy = changed(path, None, base)
    node = copy
    *sections, name = path.split(".")
    for section in sections:
        node = node[section]
    del node[name]
    return copy


def entry(report: Report, key: str) -> Entry:
    (found,) = [entry for entry in report.entries if entry.key == key]
    return found


def refusal(config: dict[str, Any], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, world_size=world_size)
    return str(caught.value)


def test_a_usual_zero3_nvme_file_passes() -> None:
    config, report = load(ZERO3_NVME)
    assert config == TieringConfig.model_validate(
        {
            "train_batch_size": 4,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "precision": "bf16",
            "gradient_clipping": 1.0,
            "steps_per_print": 2000,
            "monitor": {"tensorboard": {"enabled": True, "output_path": "logs"}},
            "optimizer": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
            "zero": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
                "sub_group_size": 10**8,
                "persistence_threshold": 10**4,
            },
            "tiering": {
                "host_budget": 2**28,
                "cache_in_host": False,
                "io": {"block_size": 262144, "queue_depth": 32},
            },
        }
    )
    assert report.refused == ()
    verdicts = {
        "train_batch_size": Verdict.HONOURED,
        "zero_optimization.sub_group_size": Verdict.HONOURED,
        "bf16.enabled": Verdict.MAPPED,
        "zero_optimization.stage3_prefetch_bucket_size": Verdict.MAPPED,
        "zero_optimization.offload_param.buffer_count": Verdict.IGNORED,
        "fp16.enabled": Verdict.IGNORED,
        "elasticity": Verdict.IGNORED,
        "tiering.host_budget": Verdict.HONOURED,
    }
    assert {key: entry(report, key).verdict for key in verdicts} == verdicts
    assert all(entry.note for entry in report.entries if entry.verdict is not Verdict.HONOURED)


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found += leaves(value, f"{key}.") if isinstance(value, dict) and key in SECTIONS else [key]
    return found


def test_the_report_holds_every_given_key_in_order() -> None:
    _, report = load(ZERO3_NVME)
    assert [entry.key for entry in report.entries] == leaves(ZERO3_NVME)


def test_the_report_prints() -> None:
    _, report = load(ZERO3_NVME)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table())
    text = console.export_text()
    assert "zero_optimization.stage3_gather_16bit_weights_on_model_save" in text
    assert "precision = bf16" in text


def test_files_and_mappings_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO3_NVME), encoding="utf-8")
    assert load(path) == load(str(path)) == load(ZERO3_NVME)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: .*line 1"),
        ("[]", "must hold a JSON object, not a list"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is there twice"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*none\.json: No such file"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        (
            "zero_optimization.offload_parm",
            "zero_optimization.offload_parm: unknown key; did you mean offload_param?",
        ),
        ("zero_optimisation", "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ("tiering.io.que_depth", "tiering.io.que_depth: unknown key; did you mean queue_depth?"),
        ("aio.threads_count", "did you mean thread_count?"),
        ("offload_param", "did you mean zero_optimization.offload_param?"),
        ("host_budget", "did you mean tiering.host_budget?"),
        ("zero_optimization.nvme_path", "did you mean zero_optimization.offload_optimizer.nvme_path or "),
        ("optimizer.params.xyzzy", "optimizer.params.xyzzy: unknown key; remove it"),
    ],
)
def test_unknown_keys_get_a_suggestion(path: str, suggestion: str) -> None:
    assert suggestion in refusal(changed(path, {}))


def test_a_dotted_name_is_no_nested_key() -> None:
    assert "unknown key; a dot in a name means nothing here" in refusal(
        MINIMAL | {"zero_optimization.sub_group_size": 5}
    )


def test_all_problems_come_together() -> None:
    config = changed("zero_optimization.offload_parm", {}, ZERO3_NVME)
    config["train_batch_size"] = 5
    config["gradient_clipping"] = -1
    config["tiering"]["host_budget"] = "1Gib"
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = None
    message = refusal(config)
    assert message.startswith("[TIER-CONFIG] 5 problems")
    assert "train_batch_size 5, train_micro_batch_size_per_gpu 2 with world size 1 do not agree" in message
    assert "zero_optimization.offload_parm: unknown key" in message
    assert "gradient_clipping: should be greater than or equal to 0, not -1" in message
    assert "tiering.host_budget: unknown unit 'Gib'" in message
    assert "zero_optimization.offload_optimizer: device 'nvme' needs nvme_path" in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.type", "OneBitAdam"),
        ("optimizer.params.amsgrad", True),
        ("zero_optimization.zero_quantized_weights", True),
        ("bf16.bf16_optimizer_states", True),
        ("optimizer.params.fp32_optimizer_states", False),
        ("elasticity", {"enabled": True}),
        ("amp", {"opt_level": "O1"}),
        ("sparse_gradients", True),
        ("managed_gradient_accumulation", False),
        ("data_types.buffer_dtype", "fp32"),
        ("scheduler.params.last_batch_iteration", 5),
    ],
)
def test_what_is_planned_is_refused(path: str, value: object) -> None:
    message = refusal(changed(path, value))
    assert f"{path}: " in message
    assert "not supported in this version" in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fp16", {"enabled": False}),
        ("scheduler", None),
        ("scheduler", {}),
        ("zero_optimization.offload_param", None),
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("zero_optimization.cpu_offload", False),
        ("optimizer.params.bias_correction", True),
        ("prescale_gradients", False),
        ("compression_training", {}),
    ],
)
def test_features_that_are_off_change_nothing(path: str, value: object) -> None:
    config, report = load(changed(path, value))
    assert config == load(MINIMAL)[0]
    assert {entry.verdict for entry in report.entries if entry.key.startswith(path)} == {Verdict.IGNORED}


def test_ranks_share_a_batch() -> None:
    config, _ = load(changed("train_batch_size", 8), world_size=4)
    assert (config.world_size, config.train_batch_size, config.gradient_accumulation_steps) == (4, 8, 2)
    message = refusal(changed("train_batch_size", 6), world_size=4)
    assert (
        "train_batch_size: train_batch_size 6, train_micro_batch_size_per_gpu 1 with world size 4" in message
    )


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("zero_optimization.reduce_scatter", False, "exchange shards"),
        ("zero_optimization.allgather_bucket_size", 5e8, "one collective for each group"),
        ("zero_optimization.overlap_comm", False, "always run beside compute"),
        ("zero_optimization.contiguous_gradients", False, "one buffer for each group"),
        ("zero_optimization.round_robin_gradients", True, "an equal shard of each group"),
        ("prescale_gradients", True, "summed in fp32 and averaged once"),
        ("gradient_predivide_factor", 4, "summed in fp32 and averaged once"),
        ("gradient_allreduce_op", "Mean", "averaged over ranks"),
        ("sequence_parallel_size", 1, "there is nothing to do"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_tunes_collectives_is_ignored_with_a_reason(
    path: str, value: object, why: str, world_size: int
) -> None:
    base = changed("train_batch_size", world_size)
    config, report = load(changed(path, value, base), world_size=world_size)
    found = entry(report, path)
    assert (found.verdict, why in found.note) == (Verdict.IGNORED, True)
    assert config == load(base, world_size=world_size)[0]


def test_a_sum_of_gradients_is_their_average_in_one_process_only() -> None:
    given = changed("gradient_allreduce_op", "sum", changed("train_batch_size", 3))
    assert load(given)[0] == load(changed("train_batch_size", 3))[0]
    message = refusal(given, world_size=3)
    assert "gradient_allreduce_op: 'sum' is not supported in this version" in message
    assert "a loss times 3" in message


@pytest.mark.parametrize(
    ("given", "read"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), (None, "auto")]
)
def test_gradients_between_ranks_have_a_dtype(given: str | None, read: str) -> None:
    config, _ = load(changed("communication_data_type", given))
    assert config.tiering.reduce_dtype == read
    assert load(changed("tiering.reduce_dtype", read))[0] == config
    assert "one of fp32, bf16, fp16 is needed, not 'int8'" in refusal(
        changed("communication_data_type", "int8")
    )


def test_ranks_wait_for_each_other_as_long_as_configured() -> None:
    waits = load(MINIMAL)[0].tiering.distributed
    assert (waits.timeout, waits.silence) == (600, 30)
    config, _ = load(changed("tiering.distributed", {"timeout": 90, "silence": 2.5}))
    assert (config.tiering.distributed.timeout, config.tiering.distributed.silence) == (90, 2.5)
    for value in (0, -1, "10s"):
        assert "tiering.distributed.silence: " in refusal(changed("tiering.distributed.silence", value))


def test_steps_in_backward_are_for_one_process() -> None:
    given = changed("tiering.step_in_backward", True, changed("train_batch_size", 2))
    assert load(given)[0].tiering.step_in_backward
    message = refusal(given, world_size=2)
    assert "tiering.step_in_backward: true with 2 ranks is not supported in this version" in message
    assert "set step_in_backward to false, or run one process" in message


def test_leaf_modules_are_honoured() -> None:
    given = {"classes": "Experts", "name_suffixes": ["mlp", "moe"]}
    config, report = load(changed("zero_optimization.leaf_module", given))
    leaf = config.zero.leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (("Experts",), (), ("mlp", "moe"))
    assert entry(report, "zero_optimization.leaf_module.classes").verdict is Verdict.HONOURED
    assert "leaf_module.names: " in refusal(changed("zero_optimization.leaf_module", {"names": [""]}))


@pytest.mark.parametrize("section", [None, {}, {"stage": 0}])
def test_without_zero_nothing_is_partitioned(section: object) -> None:
    config, report = load({"train_batch_size": 1, "zero_optimization": section})
    assert (config.zero.stage, config.zero.offload_param.device) == (0, "none")
    assert (load({"train_batch_size": 1})[0], report.refused) == (config, ())


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"train_batch_size": 8}, (8, 1, 8)),
        ({"gradient_accumulation_steps": 4}, (4, 1, 4)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4.0}, (4, 1, 4)),
        (
            {
                "train_micro_batch_size_per_gpu": "auto",
                "train_batch_size": 8,
                "gradient_accumulation_steps": 2,
            },
            (8, 4, 2),
        ),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, (8, 8, 1)),
    ],
)
def test_batch_numbers_are_resolved(changes: dict[str, Any], batch: tuple[int, int, int]) -> None:
    config, _ = load(MINIMAL | changes)
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == batch


def test_auto_that_only_a_trainer_can_fill_is_refused() -> None:
    assert "gradient_accumulation_steps: 'auto'" in refusal(changed("gradient_accumulation_steps", "auto"))
    for path in ("optimizer.params.lr", "gradient_clipping", "bf16.enabled", "fp16.enabled"):
        assert f"{path}: 'auto' is for a trainer to fill in" in refusal(changed(path, "auto"))


def test_auto_that_is_known_here_is_filled() -> None:
    config, _ = load(changed("zero_optimization.stage3_param_persistence_threshold", "auto"))
    assert config.zero.persistence_threshold == 10**5
    config, _ = load(changed("tiering.host_budget", "auto"))
    assert config.tiering.host_budget == "auto"


def test_old_and_short_names_are_mapped() -> None:
    assert load(changed("zero_optimization.cpu_offload", True))[0].zero.offload_optimizer.device == "cpu"
    assert load(changed("zero_optimization.cpu_offload_param", True))[0].zero.offload_param.device == "cpu"
    assert load(changed("zero_optimization.prefetch_bucket_size", 7))[0].zero.prefetch_elements == 7
    assert load(changed("bfloat16.enabled", True))[0].precision == "bf16"
    assert load(changed("bf16.enabled", False))[0].precision == "fp32"
    assert load(changed("data_types.grad_accum_dtype", "bf16"))[0].tiering.grad_accum_dtype == "bf16"
    assert load(changed("data_types.grad_accum_dtype", None))[0].tiering.grad_accum_dtype == "auto"


def test_adam_means_adamw_unless_told_otherwise() -> None:
    adam = changed("optimizer.type", "adam")
    assert load(adam)[0].optimizer.type == "Adam"
    assert load(adam)[0].optimizer.decoupled is True
    assert load(changed("optimizer.params.adam_w_mode", False, adam))[0].optimizer.decoupled is False


def test_two_keys_for_one_setting_must_agree() -> None:
    aio = changed("aio.block_size", 65536)
    assert load(changed("tiering.io.block_size", "64K", aio))[0].tiering.io.block_size == 65536
    message = refusal(changed("tiering.io.block_size", "1MiB", aio))
    assert "tiering.io.block_size: '1MiB' contradicts aio.block_size, which says 65536" in message


def test_what_the_io_engine_can_do_is_honoured() -> None:
    given: dict[str, Any] = json.loads(json.dumps(ZERO3_NVME))
    given["zero_optimization"]["offload_param"]["nvme_path"] = ["/nvme0", "/nvme1"]
    given["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/nvme2"
    given["tiering"] = {"verify": True, "io": {"engine": "io_uring", "registered": False}}
    config, report = load(given)
    assert config.zero.offload_param.nvme_path == (Path("/nvme0"), Path("/nvme1"))
    assert config.zero.offload_optimizer.nvme_path == (Path("/nvme2"),)
    assert (config.tiering.verify, config.tiering.io.engine, config.tiering.io.registered) == (
        True,
        "io_uring",
        False,
    )
    verdicts = {entry.key: entry.verdict for entry in report.entries}
    for key in (
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.nvme_path",
        "tiering.verify",
        "tiering.io.engine",
        "tiering.io.registered",
    ):
        assert verdicts[key] is Verdict.HONOURED


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_sound(path: Path) -> None:
    config, report = load(path)
    assert report.refused == ()
    assert config.zero.offload_param.device == "nvme"


def test_a_wrong_path_in_a_list_is_told_by_its_key() -> None:
    for wrong in (["/a", 3], [], ["/a", "/a"], {"a": "b"}):
        message = refusal(changed("zero_optimization.offload_param.nvme_path", wrong, ZERO3_NVME))
        assert "zero_optimization.offload_param.nvme_path: " in message


def test_sections_must_be_sections() -> None:
    assert "zero_optimization: a section {...} is needed, not True" in refusal(
        MINIMAL | {"zero_optimization": True}
    )


def test_problems_between_sections_are_told_by_the_key_of_the_tiers() -> None:
    given = changed("tiering.step_in_backward", True, without("bf16", ZERO3_NVME))
    message = refusal(changed("tiering.state", "split", given))
    assert message.startswith("[TIER-CONFIG] 2 problems")
    assert "tiering.state: 'split' with precision fp32: " in message
    assert "tiering.step_in_backward: true with gradient_clipping 1: " in message


def test_the_state_format_is_honoured() -> None:
    for state in ("fp32", "split", "bf16", "split+bf16"):
        config, report = load(changed("tiering.state", state, ZERO3_NVME))
        assert (config.tiering.state, entry(report, "tiering.state").verdict) == (state, Verdict.HONOURED)


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_checks_of_all_gradients_forbid_steps_in_backward(section: str) -> None:
    given = changed(f"{section}.enabled", True, MINIMAL)
    both = changed("tiering.step_in_backward", True, given)
    key = f"{section}.check_grad_overflow"
    assert load(both)[0].tiering.step_in_backward
    assert load(changed(key, False, both))[0].tiering.step_in_backward
    assert entry(load(changed(key, True, given))[1], key).verdict is Verdict.IGNORED
    message = refusal(changed(key, True, both))
    assert f"{key}: True with tiering.step_in_backward" in message
    assert "set check_grad_overflow to false, or step_in_backward to false" in message
    off = changed(f"{section}.enabled", False, changed(key, True, both))
    assert load(off)[0].tiering.step_in_backward  # a section that is off asks for nothing


def test_examine_reports_what_load_refuses() -> None:
    config, report = examine(changed("tiering.step_in_backward", True, ZERO3_NVME))
    assert config is None
    assert [entry.key for entry in report.refused] == ["tiering.step_in_backward"]


ATOMS = [
    None,
    True,
    False,
    0,
    1,
    3,
    -1,
    1e9,
    0.5,
    float("nan"),
    "",
    "auto",
    "1K",
    "nvme",
    "AdamW",
    "SGD",
    "WarmupLR",
    "OneCycle",
    "float16",
    {},
    10**400,
    [],
    [0.9, 0.99],
]
JSON = st.sampled_from(ATOMS) | st.dictionaries(
    st.sampled_from(["enabled", "device", "x"]), st.sampled_from(ATOMS)
)


@given(st.dictionaries(st.sampled_from(sorted([*KEYS, *SECTIONS, "x", "tiering.x"])), JSON, max_size=6))
def test_any_value_anywhere_is_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    config: dict[str, Any] = json.loads(json.dumps(ZERO3_NVME))
    for path, value in values.items():
        node: Any = config
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[name] = value
    resolved, report = examine(config)
    assert (resolved is None) == bool(report.refused)
    assert all(entry.note for entry in report.refused)
