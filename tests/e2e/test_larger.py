"""A model whose fp32 weights are more than its process may have is built, placed and trained in that process.

The kernel refuses the process as much anonymous memory as those weights take (RLIMIT_DATA), from before the model is
built. Resident memory stays within what the plan and the tape say, on top of what a tiny model of the same kind takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zero3.building.tape import GROWTH_LIMIT

MIB = 1 << 20

TRAIN = """
import gc, json, os, resource, sys

os.environ["HF_HUB_OFFLINE"] = "1"
from pathlib import Path
import torch
import tiering
from tiering.placement.workload import Tier

case = json.loads(sys.argv[1])

def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def build(shape):
    if case["kind"] == "gpt":
        from tiering.demo.model import GPT
        return GPT(**shape)
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**shape))

def loss_of(engine, tokens):
    if case["kind"] == "gpt":
        return engine(tokens[:, :-1], tokens[:, 1:])
    return engine(input_ids=tokens, labels=tokens).loss

def train(shape):
    torch.manual_seed(0)
    with tiering.zero.Init():
        model = build(shape)
    report = {"built": status("VmHWM")}
    sizes = [parameter.numel() for parameter in model.parameters()]
    with tiering.initialize(model=model, config=case["config"]).engine as engine:
        report["filled"] = status("VmHWM")
        losses = []
        for _ in range(2):
            loss = loss_of(engine, torch.arange(65).unsqueeze(0))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        snapshot, plan = engine.snapshot(), engine.plan
    return report | {
        "trained": status("VmHWM"),
        "losses": losses,
        "parameters": sum(sizes),
        "largest": max(sizes),
        "activations": snapshot.activations.peak,
        "planned": plan.total(Tier.DEVICE) + plan.total(Tier.HOST),
        "on_nvme": plan.total(Tier.NVME),
    }

train(case["tiny"])  # what is loaded late is loaded now
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
base = status("VmRSS")
resource.setrlimit(resource.RLIMIT_DATA, (case["limit"], case["limit"]))
try:
    torch.empty(case["limit"] // 4)
    print("the limit holds nobody back", file=sys.stderr)
except RuntimeError:
    print(json.dumps(train(case["shape"]) | {"base": base}))
"""


@dataclass(frozen=True)
class Case:
    """A model of ``parameters``, and budgets. So many ``gradients`` of its largest parameter exist at one time."""

    kind: str
    shape: dict[str, Any]
    tiny: dict[str, Any]
    parameters: int
    host: str
    device: str
    gradients: int

    def config(self, nvme: Path) -> dict[str, Any]:
        swap = {"device": "nvme", "nvme_path": str(nvme)}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": swap, "offload_optimizer": swap},
            "tiering": {
                "host_budget": self.host,
                "device_budget": self.device,
                "telemetry": {"enabled": False},
            },
        }


GPT = {"width": 768, "layers": 16, "heads": 12, "sequence": 64}
OURS = Case(
    "gpt",
    shape=GPT,
    tiny=GPT | {"width": 64, "layers": 2, "heads": 2},
    parameters=113_849_856,
    host="64MiB",
    device="24MiB",
    gradients=1,
)
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65,
    "tie_word_embeddings": True,
    "use_cache": False,
}
# torch keeps the gradient as head until that as embedding is there, and adds the two into a third.
TIED = Case(
    "llama",
    shape=LLAMA,
    tiny=LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    parameters=315_933_696,
    host="256MiB",
    device="96MiB",
    gradients=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(OURS, id="gpt"), pytest.param(TIED, id="llama")])
def test_weights_that_are_more_than_the_process_may_have(tmp_path: Path, case: Case) -> None:
    weights = 4 * case.parameters
    task = {
        "kind": case.kind,
        "shape": case.shape,
        "tiny": case.tiny,
        "limit": weights,
        "config": case.config(tmp_path),
    }
    # One thread does not spin for another; large blocks go back at once, so that the limit is on what is in use.
    settings = {"TIERING_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | settings,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["parameters"] == case.parameters
    first, second = report["losses"]
    assert second < first
    assert report["on_nvme"] > 3 * weights, "master and moments, most of 16 bytes per parameter"
    fp32, bf16 = 4 * report["largest"], 2 * report["largest"]
    beside = {
        "built": GROWTH_LIMIT + 2 * fp32,  # head and embedding are made apart, and tied then
        "filled": report["planned"] + GROWTH_LIMIT + fp32,
        "trained": report["planned"] + GROWTH_LIMIT + report["activations"] + case.gradients * bf16,
    }
    for when, bound in beside.items():
        net = report[when] - report["base"]
        assert net <= bound < weights, {
            when: net / MIB,
            "bound": bound / MIB,
            "weights": weights / MIB,
            **report,
        }
    assert list(tmp_path.iterdir()) == []
