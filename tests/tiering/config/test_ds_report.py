"""The report of a configuration file: each key that was given, and what becomes of it."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from tiering.config.ds_config import KeyReport, KeyVerdict, Origin, load
from tiering.config.ds_config.known_keys import SECTIONS

from .ds_cases import ZERO3_NVME, changed


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        keys += leaves(value, f"{key}.") if isinstance(value, dict) and key in SECTIONS else [key]
    return keys


def test_the_report_holds_every_given_key_in_order() -> None:
    _, report = load(ZERO3_NVME)
    assert [entry.key for entry in report.entries] == leaves(ZERO3_NVME)


def printed(report: KeyReport, width: int, **options: bool) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.render(width, **options))
    return console.export_text()


def test_the_report_prints() -> None:
    _, report = load(ZERO3_NVME)
    table = printed(report, 200)
    (row,) = [line for line in table.splitlines() if "zero_optimization.sub_group_size" in line]
    assert row.split()[:5] == ["zero_optimization.sub_group_size", "100000000", "honoured", "file", "Maximum"]
    narrow = printed(report, 80)
    assert "zero_optimization.sub_group_size = 100000000  honoured\n    Maximum elements" in narrow
    assert (
        "zero_optimization.stage3_prefetch_bucket_size = 50000000  mapped (auto)\n    DeepSpeed's" in narrow
    )
    assert "scheduler" not in printed(report, 200, defaults=True)  # there is none
    (row,) = [line for line in printed(report, 200, defaults=True).splitlines() if " tiering.state " in line]
    assert row.split()[:4] == ["tiering.state", '"fp32"', "honoured", "default"]


def test_the_report_in_one_line() -> None:
    _, report = load(changed("zero_optimization.cpu_offload_use_pin_memory", True, ZERO3_NVME))
    assert report.short() == (
        "batch 4 = 2 x 2 micro-batches, bf16, ZeRO stage 3, parameters on nvme, optimizer state on nvme, AdamW,"
        " gradients clipped at 1; no effect: torch_adam, buffer_count, buffer_size, max_in_cpu, fast_init,"
        " stage3_max_reuse_distance and 1 more; deprecated: cpu_offload_use_pin_memory, thread_count;"
        " run `tiering check FILE` for the reasons"
    )
    plain = load({"train_batch_size": 6, "gradient_clipping": 0}, world_size=2)[1]
    assert plain.short() == "batch 6 = 3 x 2 ranks, fp32, ZeRO stage 0, no clipping"


def test_what_nobody_gave_is_told_with_its_default() -> None:
    _, report = load({"train_batch_size": 4, "fp16": {"enabled": True}})
    defaults = {entry.key: entry for entry in report.defaults}
    assert {entry.origin for entry in report.defaults} == {Origin.DEFAULT}
    assert defaults["gradient_clipping"].value == 1.0
    assert defaults["fp16.initial_scale_power"].value == 16
    assert defaults["zero_optimization.sub_group_size"].value == 10**9
    assert not defaults.keys() & {"train_batch_size", "fp16.enabled", "optimizer.params.lr", "bf16.enabled"}
    plain = {entry.key: entry for entry in load({"train_batch_size": 4})[1].defaults}
    assert plain["data_types.param_dtype"].value == "fp32", "in a key that has such values"
    assert not [entry for entry in plain.values() if entry.verdict is KeyVerdict.DEPRECATED]
    json.dumps(report.as_json(), allow_nan=False)
