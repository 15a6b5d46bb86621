"""The scripts in examples/ do what they say, on one rank and on two."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.run import parse_args

import tiering
from tiering.demo.model import GPT
from tiering.placement.workload import Tier
from zero3.engine.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Said:
    """What a script prints, on rank 0."""

    text: str

    @property
    def losses(self) -> dict[int, float]:
        """By the number of the step."""
        matches = re.findall(r"^step (\d+): loss ([\d.]+)", self.text, re.MULTILINE)
        return {int(step): float(loss) for step, loss in matches}

    @property
    def right(self) -> float:
        """The share of right answers about what was not trained on."""
        return float(re.findall(r"^right answers: ([\d.]+)%$", self.text, re.MULTILINE)[0]) / 100

    def falls(self, *, by: float) -> bool:
        """Whether the loss has fallen, from the first that is told to the last, by at least this much."""
        first, *_, last = self.losses.values()
        return last < first - by


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[Said, Engine]]]:
    """``run(name, argument...)`` is an example in this process: what it has printed, and its engine."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    engines: list[Engine] = []
    initialize = tiering.initialize

    def watched(**keywords: Any) -> Any:
        parts = initialize(**keywords)
        engines.append(parts.engine)
        return parts

    monkeypatch.setattr(tiering, "initialize", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small to share out

    def start(name: str, *arguments: object) -> tuple[Said, Engine]:
        main = runpy.run_path(str(EXAMPLES / name))["main"]
        main([str(argument) for argument in arguments])
        return Said(capsys.readouterr().out), engines[-1]

    yield start
    torch.set_num_threads(threads)
    if dist.is_initialized():  # by init_distributed
        dist.destroy_process_group()


def test_digits_are_told_apart(run: Callable[..., tuple[Said, Engine]]) -> None:
    output, engine = run("mnist/train.py", "--steps", 40)
    assert output.falls(by=0.7) and output.right > 0.4, output.text
    assert engine.settings.precision == "fp32"


@pytest.mark.slow
def test_shapes_are_told_apart(run: Callable[..., tuple[Said, Engine]]) -> None:
    output, engine = run("cifar/train.py", "--steps", 30)
    assert output.falls(by=0.3) and output.right > 0.2, output.text
    rates = re.findall(r"lr ([\d.e-]+)$", output.text, re.MULTILINE)
    assert rates == ["1.80e-03", "2.00e-03", "2.00e-03"]
    assert (engine.settings.precision, engine.settings.zero.stage) == ("bf16", 1)


def test_masked_bytes_are_found_with_the_optimizer_on_the_cpu(
    run: Callable[..., tuple[Said, Engine]],
) -> None:
    output, engine = run("bert_mlm/train.py", "--steps", 6)
    assert output.falls(by=0.7), output.text
    assert output.text.startswith("ZeRO stage 2, 16 samples a step\n")
    trained = sum(param.numel() for param in engine.module.parameters())
    assert engine.plan.contents(Tier.HOST)["optimizer state"] >= 12 * trained
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.01, 0.0]


def test_lines_are_told_apart_in_fp16(run: Callable[..., tuple[Said, Engine]], tmp_path: Path) -> None:
    output, engine = run("text_classification/train.py", "--steps", 60, "--save", tmp_path)
    assert output.falls(by=0.05) and output.right > 0.3, output.text
    assert (engine.settings.precision, engine.settings.zero.stage) == ("fp16", 2)
    assert engine.micro_steps == 2 * engine.global_steps == 120
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
    assert saved["head.weight"].shape == (5, 64)


def test_stage_3_in_host_memory(run: Callable[..., tuple[Said, Engine]], tmp_path: Path) -> None:
    output, engine = run("zero3_offload/train.py", "--steps", 8, "--save", tmp_path)
    assert output.falls(by=0.5), output.text
    assert {"parameters", "gradients", "optimizer state"} <= engine.plan.contents(Tier.HOST).keys()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == GPT(width=128, layers=4, heads=4, sequence=64).state_dict().keys()
    norms = [saved[name].float().norm().item() for name in ("head.weight", "embedding.weight")]
    assert output.text.endswith(f"norm of the head {norms[0]:.3f}, of the embedding {norms[1]:.3f}\n")


def test_stage_3_on_nvme_goes_on_where_it_stopped(
    run: Callable[..., tuple[Said, Engine]], tmp_path: Path
) -> None:
    """To the last digit that it prints, with the weights on disk; and nothing stays there."""
    (nvme := tmp_path / "nvme").mkdir()
    swap = ("--nvme", nvme, "--save_interval", 3)
    whole, engine = run("zero3_nvme/train.py", "--steps", 6, *swap)
    assert whole.falls(by=0.5), whole.text
    assert engine.plan.contents(Tier.NVME).keys() == {"parameters", "optimizer state"}
    (path,) = engine.snapshot().io
    assert path.path == str(nvme) and path.read.bytes > 0 and path.written.bytes > 0
    run("zero3_nvme/train.py", "--steps", 3, *swap, "--checkpoints", tmp_path / "saved")
    rest, _ = run("zero3_nvme/train.py", "--steps", 6, *swap, "--checkpoints", tmp_path / "saved")
    assert rest.text.startswith("goes on behind 24 samples\n")
    assert list(whole.losses.items())[3:] == list(rest.losses.items())
    assert list(nvme.iterdir()) == []


def test_a_save_waits_for_the_end_of_an_accumulation(
    run: Callable[..., tuple[Said, Engine]], tmp_path: Path
) -> None:
    """Each step of two micro-batches is printed and saved once, after the second."""
    config = json.loads((EXAMPLES / "zero3_nvme" / "ds_config.json").read_text(encoding="utf-8"))
    config.pop("train_batch_size", None)
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    (accumulates := tmp_path / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    script = (
        "zero3_nvme/train.py",
        "--nvme",
        tmp_path,
        "--save_interval",
        1,
        "--deepspeed_config",
        accumulates,
    )
    output, engine = run(*script, "--steps", 2, "--checkpoints", tmp_path / "saved")
    assert [*output.losses] == [1, 2] and engine.micro_steps == 4
    assert {path.name for path in (tmp_path / "saved").glob("global_step*")} == {
        "global_step1",
        "global_step2",
    }
    rest, _ = run(*script, "--steps", 3, "--checkpoints", tmp_path / "saved")
    assert rest.text.startswith("goes on behind 16 samples\n") and [*rest.losses] == [3]


def test_the_script_for_ranks_is_that_of_one_process(
    run: Callable[..., tuple[Said, Engine]], tmp_path: Path
) -> None:
    output, engine = run("train_ranks.py", "--steps", 4, "--nvme", tmp_path)
    assert output.falls(by=0.1) and output.text.startswith(str(engine.plan)), output.text
    assert engine.plan.contents(Tier.NVME).keys() == {"parameters", "optimizer state"}


# Transformers has renamed what peft calls.
RENAMED = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")


# Slow, as the import of peft is.
@pytest.mark.slow
@RENAMED
@pytest.mark.parametrize("script", ["lora_nvme.py", "qlora_nvme.py"])
def test_adapters_are_trained_over_a_frozen_model_on_nvme(
    run: Callable[..., tuple[Said, Engine]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """A step writes nothing to NVMe, placement changes no digit, and peft loads the adapter."""
    import peft
    import transformers

    monkeypatch.syspath_prepend(EXAMPLES)
    (nvme := tmp_path / "nvme").mkdir()
    output, engine = run(script, "--steps", 12, "--nvme", nvme, "--save", tmp_path / "adapter")
    assert output.falls(by=0.8), output.text
    read, written = engine.plan.nvme_traffic()
    assert output.text.startswith(f"a step reads {read} bytes from NVMe and writes {written}\n")
    assert read > 2 * 10**6 and written == 0
    assert list(nvme.iterdir()) == []
    in_memory, other = run(script, "--steps", 12, "--nvme", nvme, "--host-budget", "100MiB")
    assert other.plan.nvme_traffic() == (0, 0)
    assert in_memory.losses == output.losses
    base = transformers.LlamaForCausalLM(engine.module.get_base_model().config)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 4 * 7 * 2
    for name, values in peft.get_peft_model_state_dict(loaded).items():
        assert torch.equal(values, saved[name].to(values.dtype)), name


@pytest.mark.slow
@RENAMED
@pytest.mark.parametrize("form", ["bf16", "nf4"])
def test_adapters_are_trained_over_the_files_of_a_model(
    run: Callable[..., tuple[Said, Engine]], tmp_path: Path, form: str
) -> None:
    """The frozen weights come from the files, under the names that they have without adapters."""
    import peft
    import tokenizers
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(5)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=256)).bfloat16()
    base.save_pretrained(tmp_path / "base")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "base")

    (nvme := tmp_path / "nvme").mkdir()
    options = ("--nvme", nvme, "--model", tmp_path / "base", "--base", form, "--save", tmp_path / "adapter")
    output, _ = run("lora_nvme.py", "--steps", 2, *options)
    # Adapters begin with a product of zero, so the first loss is that of the base model.
    tokens = runpy.run_path(str(EXAMPLES / "lora_nvme.py"))["text_of"](tmp_path / "base", size=4)(1)
    quantised = tiering.quantize(copy.deepcopy(base).requires_grad_(False), form) if form != "bf16" else base
    with torch.no_grad():
        expected = quantised(input_ids=tokens, labels=tokens).loss.item()
    assert output.losses[1] == pytest.approx(expected, abs=2e-3)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert any(bool(p.any()) for name, p in loaded.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_two_ranks_run_them_all(tmp_path: Path) -> None:
    (nvme := tmp_path / "nvme").mkdir()
    arguments: dict[str, list[object]] = {
        "mnist/train.py": ["--steps", 30],
        "cifar/train.py": ["--steps", 20],
        "bert_mlm/train.py": ["--steps", 4],
        "text_classification/train.py": ["--steps", 40],
        "zero3_offload/train.py": ["--steps", 5, "--save", tmp_path],
        "zero3_nvme/train.py": [
            "--steps",
            4,
            "--nvme",
            nvme,
            "--checkpoints",
            tmp_path,
            "--save_interval",
            4,
        ],
        "train_ranks.py": ["--steps", 3, "--nvme", nvme, "--weights", tmp_path / "weights.pt"],
    }
    scripts = {str(EXAMPLES / name): [*map(str, line)] for name, line in arguments.items()}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    driver = Path(__file__).with_name("one_after_another.py")
    done = subprocess.run(
        [
            sys.executable,
            *launch,
            str(driver),
            json.dumps([[name, *line] for name, line in scripts.items()]),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TIERING_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^== (.+)\n", done.stdout, flags=re.MULTILINE)[1:]
    outputs = {name: Said(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    assert outputs.keys() == scripts.keys()
    assert [name for name, script in outputs.items() if not script.falls(by=0.02)] == [], done.stdout
    steps = [len(script.losses) for script in outputs.values()]
    assert steps == [3, 2, 4, 4, 5, 4, 3], "one rank prints"
    assert done.stdout.count("Placement plan") == 1
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert load_file(tmp_path / "model.safetensors")["head.weight"].shape == (256, 128)
    assert torch.load(tmp_path / "weights.pt")["embedding.weight"].dtype is torch.bfloat16
    assert list(nvme.iterdir()) == []


def called(script: Path, tools: Path, *arguments: str, **environment: str) -> list[str]:
    """What a launch file calls, where srun, torchrun and scontrol only show their arguments."""
    shown = {"srun": 'printf "%s\\n" "$@"', "scontrol": 'printf "node7\\nnode8\\n"'}
    for name, says in (shown | {"torchrun": shown["srun"]}).items():
        (tools / name).write_text(f"#!/bin/sh\n{says}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tools}:/usr/bin:/bin"} | environment,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("script", ["ranks.sbatch", "cifar/launch.sbatch"])
def test_the_slurm_scripts_are_some(tmp_path: Path, script: str) -> None:
    command = called(
        EXAMPLES / script,
        tmp_path,
        SLURM_CPUS_PER_TASK="96",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_ID="4711",
        SLURM_JOB_NODELIST="node[7-8]",
    )
    assert command[:2] == ["--cpus-per-task=96", "torchrun"]
    launch = parse_args(command[2:])
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_id) == ("2", "8", "4711")
    assert launch.rdzv_endpoint == "node7:29500"
    assert (EXAMPLES.parent / launch.training_script).is_file()


def test_the_shell_script_starts_a_rank_for_each_gpu(tmp_path: Path) -> None:
    launch = parse_args(called(EXAMPLES / "cifar" / "launch.sh", tmp_path, "--steps", "7"))
    assert (launch.standalone, launch.nproc_per_node) == (True, "gpu")
    assert Path(launch.training_script) == EXAMPLES / "cifar" / "train.py"
    config = str(EXAMPLES / "cifar" / "ds_config.json")
    assert launch.training_script_args == ["--deepspeed", "--deepspeed_config", config, "--steps", "7"]
