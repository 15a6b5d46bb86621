from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.config.ds_config import KeyVerdict, examine, load
from tiering.config.ds_config.known_keys import KEYS, SECTIONS
from tiering.config.training import StepPolicy, TieringConfig

from .ds_cases import MINIMAL, UNCLIPPED, ZERO3_NVME, changed, entry, refusal, without


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
                "live_elements": 10**9,
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
        "train_batch_size": KeyVerdict.HONOURED,
        "zero_optimization.sub_group_size": KeyVerdict.HONOURED,
        "bf16.enabled": KeyVerdict.MAPPED,
        "zero_optimization.stage3_prefetch_bucket_size": KeyVerdict.MAPPED,
        "zero_optimization.offload_param.buffer_count": KeyVerdict.NO_EFFECT,
        "fp16.enabled": KeyVerdict.MAPPED,
        "elasticity": KeyVerdict.NO_EFFECT,
        "aio.thread_count": KeyVerdict.DEPRECATED,
        "tiering.host_budget": KeyVerdict.HONOURED,
    }
    assert {key: entry(report, key).verdict for key in verdicts} == verdicts
    assert all(entry.note for entry in report.entries)


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
    assert "unknown key; a key cannot contain a dot" in refusal(
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
    ("path", "value", "remedy"),
    [
        ("optimizer.params.amsgrad", True, "amsgrad is not supported"),
        ("optimizer.params.fp32_optimizer_states", False, 'tiering.state to "bf16"'),
        ("zero_optimization.zero_quantized_nontrainable_weights", True, "not supported in this version"),
        ("zero_optimization.mics_shard_size", 8, "unknown to both DeepSpeed 0.19 and tiering"),
        (
            "progressive_layer_drop",
            {"enabled": True, "theta": 0.5},
            "unknown to both DeepSpeed 0.19 and tiering",
        ),
        (
            "quantize_training",
            {"quantize_weight_in_forward": True},
            "unknown to both DeepSpeed 0.19 and tiering",
        ),
        ("fp16.fp16_master_weights_and_grads", True, "masters are always fp32"),
        ("tensor_parallel", {"tp": {"tp_size": 4}}, "not supported in this version"),
    ],
)
def test_what_would_change_the_numbers_is_refused_with_the_line_to_delete(
    path: str, value: object, remedy: str
) -> None:
    message = refusal(changed(path, value))
    assert f"{path}: " in message
    assert remedy in message
    assert f'delete the line "{path.rpartition(".")[2]}": ' in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fp16", {"enabled": False}),
        ("scheduler", None),
        ("scheduler", {}),
        ("zero_optimization.offload_param", None),
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("zero_optimization.cpu_offload", False),
        ("zero_optimization.zenflow", None),
        ("optimizer.params.max_grad_norm", 0),
        ("compression_training", {}),
        ("flops_profiler", {"enabled": False, "top_modules": 1}),
        ("weight_quantization", {"enabled": True, "num_bits": 8}),
        ("torch_autocast", {"enabled": False}),
        ("tensor_parallel", {"autotp_size": "auto", "tp_overlap_comm": False}),
    ],
)
def test_features_that_are_off_change_nothing(path: str, value: object) -> None:
    config, report = load(changed(path, value))
    assert config == load(MINIMAL)[0]
    assert {entry.off for entry in report.entries if entry.key.startswith(path)} == {True}


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
        ("zero_optimization.overlap_comm", False, "always overlap compute"),
        ("zero_optimization.zero_hpz_partition_size", 8, "secondary partitions are not supported"),
        ("gradient_allreduce_op", "Mean", "averaged over ranks"),
        ("bf16.check_grad_overflow", False, "gradients are always checked"),
        ("hybrid_engine", {"enabled": True}, "generate()"),
        ("aio.single_submit", True, "submitted in batches"),
    ],
)
def test_what_cannot_change_the_numbers_is_let_be_with_a_reason(path: str, value: object, why: str) -> None:
    base = changed("train_batch_size", 2)
    config, report = load(changed(path, value, base), world_size=2)
    assert config == load(base, world_size=2)[0]
    assert [(entry.key, entry.verdict) for entry in report.without_effect] == [(path, KeyVerdict.NO_EFFECT)]
    assert why in report.without_effect[0].note


def test_a_sum_of_gradients_is_their_average_in_one_process_only() -> None:
    settings = changed("gradient_allreduce_op", "sum", changed("train_batch_size", 3))
    assert load(settings)[0] == load(changed("train_batch_size", 3))[0]
    message = refusal(settings, world_size=3)
    assert "gradient_allreduce_op: 'sum' is not supported in this version" in message
    assert "multiply the loss by 3" in message


@pytest.mark.parametrize(
    ("setting", "read"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), (None, "auto")]
)
def test_gradients_between_ranks_have_a_dtype(setting: str | None, read: str) -> None:
    config, _ = load(changed("communication_data_type", setting))
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
    settings = changed("tiering.step_in_backward", True, UNCLIPPED | {"train_batch_size": 2})
    assert load(settings)[0].tiering.step is StepPolicy.IN_BACKWARD
    message = refusal(settings, world_size=2)
    assert (
        "tiering.step_in_backward: 'in_backward' with 2 ranks: it is not supported in this version" in message
    )
    assert "set swap_versions to 2, step to 'deferred', or run one process" in message
    settings["tiering"]["swap_versions"] = 2
    assert load(settings, world_size=2)[0].tiering.step is StepPolicy.IN_BACKWARD


def test_a_step_has_two_names_for_one_value() -> None:
    def step_of(**tiers: object) -> StepPolicy:
        return load(UNCLIPPED | {"tiering": tiers})[0].tiering.step

    assert step_of() is step_of(step_in_backward=False) is StepPolicy.AFTER
    for policy in StepPolicy:
        assert step_of(step=policy.value) is policy
    assert step_of(step_in_backward=True) is step_of(step="in_backward", step_in_backward=True)
    assert step_of(step="deferred", step_in_backward=False) is StepPolicy.DEFERRED
    _, report = load(changed("tiering.step_in_backward", True, UNCLIPPED))
    assert entry(report, "tiering.step_in_backward").verdict is KeyVerdict.MAPPED
    for step, in_backward in [("after", True), ("deferred", True), ("auto", True), ("in_backward", False)]:
        message = refusal(UNCLIPPED | {"tiering": {"step": step, "step_in_backward": in_backward}})
        told = f'{str(in_backward).lower()} contradicts tiering.step, which is "{step}"; remove one of them'
        assert f"tiering.step_in_backward: {told}" in message
    assert "tiering.step_in_backward: true or false is needed, not 1" in refusal(
        changed("tiering.step_in_backward", 1, UNCLIPPED)
    )


def test_leaf_modules_are_honoured() -> None:
    section = {"classes": "Experts", "name_suffixes": ["mlp", "moe"]}
    config, report = load(changed("zero_optimization.leaf_module", section))
    leaf = config.zero.leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (("Experts",), (), ("mlp", "moe"))
    assert entry(report, "zero_optimization.leaf_module.classes").verdict is KeyVerdict.HONOURED
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
    assert 'tiering.io.block_size: "1MiB" contradicts aio.block_size, which is 65536' in message


def test_what_the_io_engine_can_do_is_honoured() -> None:
    settings: dict[str, Any] = json.loads(json.dumps(ZERO3_NVME))
    settings["zero_optimization"]["offload_param"]["nvme_path"] = ["/nvme0", "/nvme1"]
    settings["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/nvme2"
    settings["tiering"] = {"verify": True, "io": {"engine": "io_uring", "registered": False}}
    config, report = load(settings)
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
        assert verdicts[key] is KeyVerdict.HONOURED


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.json"))


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
    assert "zero_optimization: " in refusal({"train_batch_size": 1, "zero_optimization": 3})
    for section, value in {"bf16": True, "aio": [], "optimizer": "AdamW"}.items():
        message = refusal({"train_batch_size": 1, section: value})
        assert f"{section}: must be a section {{...}}, not {json.dumps(value)}" in message
    assert "steps_per_print: must be a single value, not {" in refusal(
        MINIMAL | {"steps_per_print": {"a": 1}}
    )


def test_problems_between_sections_are_told_by_the_key_of_the_tiers() -> None:
    settings = changed("tiering.step_in_backward", True, without("bf16", ZERO3_NVME))
    message = refusal(changed("tiering.state", "split", settings))
    assert message.startswith("[TIER-CONFIG] 2 problems")
    assert "tiering.state: 'split' with precision fp32: " in message
    assert "tiering.step_in_backward: 'in_backward' with gradient_clipping 1: " in message


def test_the_state_format_is_honoured() -> None:
    for state in ("fp32", "split", "bf16", "split+bf16"):
        config, report = load(changed("tiering.state", state, ZERO3_NVME))
        assert (config.tiering.state, entry(report, "tiering.state").verdict) == (state, KeyVerdict.HONOURED)


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_checks_of_all_gradients_forbid_steps_in_backward(section: str) -> None:
    settings = changed(f"{section}.enabled", True, UNCLIPPED)
    both = changed("tiering.step", "in_backward", settings)
    key = f"{section}.check_grad_overflow"
    assert load(both)[0].tiering.step is StepPolicy.IN_BACKWARD
    config, report = load(changed(key, False, both))
    assert config.tiering.step is StepPolicy.IN_BACKWARD
    assert key not in {entry.key for entry in report.without_effect}
    assert not load(changed(key, True, settings))[1].refused
    message = refusal(changed(key, True, both))
    assert f"{key}: True with tiering.step 'in_backward'" in message
    assert "set check_grad_overflow to false, tiering.swap_versions to 2, or tiering.step to 'def" in message
    assert not load(changed("tiering.swap_versions", 2, changed(key, True, both)))[1].refused
    off = changed(f"{section}.enabled", False, changed(key, True, both))
    assert load(off)[0].tiering.step is StepPolicy.IN_BACKWARD  # a section that is off asks for nothing


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
            # A shared empty section would become part of itself.
            node[name] = copy.deepcopy(value)
    resolved, report = examine(config)
    assert (resolved is None) == bool(report.refused)
    assert all(entry.note for entry in report.refused)
