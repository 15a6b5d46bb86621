"""TRL's trainers on the engine report what they report without it."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.zero3.ranks.pool import Pool
from tiering.integrations.transformers import TieringTrainerMixin
from zero3.passes import moved_activations

from .line_trainers import ds_config
from .shimmed import forget_process, under_shim
from .trainers import PLACES, config, differences, different, llama, reported, state

# Its trainers need a data set of this library.
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
OffloadActivations = pytest.importorskip(
    "trl.models.activation_offloading", reason="this trl has no activation offloading"
).OffloadActivations

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TEXTS = [f"the number after {number} is {number + 1}." for number in range(64)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bytewise()


def bytewise() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )


class TieredSFTTrainer(TieringTrainerMixin, trl.SFTTrainer): ...


class TieredDPOTrainer(TieringTrainerMixin, trl.DPOTrainer): ...


class TieredGRPOTrainer(TieringTrainerMixin, trl.GRPOTrainer): ...


OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "dataloader_pin_memory": False,
}


def from_directory(output: Path) -> LlamaForCausalLM:
    """A model that remembers its directory, from which trl loads its reference model."""
    if not (output / "model").exists():
        llama(vocab_size=259).save_pretrained(output / "model")
    return LlamaForCausalLM.from_pretrained(output / "model")


def of_arguments(more: dict[str, Any]) -> dict[str, Any]:
    """The options of ``more`` that are the arguments'."""
    return {
        name: more.pop(name)
        for name in [*more]
        if name.startswith(("save_", "use_cpu", "deepspeed", "activation_"))
    }


def sft(cls: type, output: Path, tokenizer: Any, steps: int, peft: Any = None, **more: Any) -> Any:
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    args = trl.SFTConfig(
        output_dir=str(output),
        eval_strategy="steps",
        eval_steps=4,
        max_length=32,
        max_steps=steps,
        **OPTIONS | of_arguments(more),
    )
    parts = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer}
    return cls(llama(vocab_size=259), args=args, peft_config=peft, **parts, **more)


def dpo(cls: type, output: Path, tokenizer: Any, steps: int, peft: Any = None, **more: Any) -> Any:
    pairs = [{"prompt": text[:-3], "chosen": text[-3:], "rejected": "?" + text[-2:]} for text in TEXTS]
    args = trl.DPOConfig(
        output_dir=str(output), max_length=48, max_steps=steps, **OPTIONS | of_arguments(more)
    )
    data = datasets.Dataset.from_list(pairs)
    return cls(
        from_directory(output),
        args=args,
        peft_config=peft,
        train_dataset=data,
        processing_class=tokenizer,
        **more,
    )


def grpo(cls: type, output: Path, tokenizer: Any, steps: int, peft: Any = None, **more: Any) -> Any:
    data = datasets.Dataset.from_list([{"prompt": text[:12]} for text in TEXTS])
    args = trl.GRPOConfig(
        output_dir=str(output),
        num_generations=2,
        max_completion_length=6,
        beta=0.1,
        max_steps=steps,
        **OPTIONS | of_arguments(more),
    )
    return cls(
        from_directory(output),
        args=args,
        peft_config=peft,
        train_dataset=data,
        processing_class=tokenizer,
        reward_funcs=length_of_words,
        **more,
    )


def length_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(str.isalnum, text))) for text in completions]


MAKERS = {
    "sft": (sft, trl.SFTTrainer, TieredSFTTrainer),
    "dpo": (dpo, trl.DPOTrainer, TieredDPOTrainer),
    "grpo": (grpo, trl.GRPOTrainer, TieredGRPOTrainer),
}
TIMES = re.compile("time|per_second")
"""Figures of trl that differ from run to run."""

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("steps", "places"), [(4, ["nvme"]), pytest.param(20, list(PLACES), marks=pytest.mark.slow)]
)
def test_a_run_reports_what_trl_reports(
    steps: int, places: list[str], name: str, adapter: bool, tokenizer: Any, tmp_path: Path
) -> None:
    make, stock, tiered = MAKERS[name]
    peft = LoraConfig(**LORA) if adapter else None
    plain = make(stock, tmp_path / "stock", tokenizer, steps, peft)
    plain.train()
    for place in places:
        settings = config(place, tmp_path)
        trainer = make(tiered, tmp_path / place, tokenizer, steps, peft, tiering_config=settings)
        trainer.train()
        # The loss of GRPO is a sum of terms around 1 that nearly cancel.
        assert list(differences(trainer, plain, 1e-6, 1e-8 if name == "grpo" else 0.0)) == [], place
        for entry, expected in zip(trainer.state.log_history, plain.state.log_history, strict=True):
            figures = {key: value for key, value in expected.items() if not TIMES.search(key)}
            assert {key: entry[key] for key in figures} == pytest.approx(figures, rel=1e-4, abs=1e-5), place
        trainer.engine.close()


@pytest.mark.slow
def test_what_activation_offloading_moves_is_not_moved_twice(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copied = set[int]()

    def on_cpu(model: Any) -> OffloadActivations:
        """As for an accelerator, which a CPU is not for torch."""
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            hooks = OffloadActivations(use_pin_memory=False, use_streams=False)
        pack = hooks.pack_hook

        @functools.wraps(pack)
        def noted(tensor: torch.Tensor) -> Any:
            copied.add(tensor.untyped_storage()._cdata)
            return pack(tensor)

        hooks.pack_hook = noted
        return hooks

    monkeypatch.setattr(moved_activations, "SMALLEST", 1024)
    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", on_cpu)
    states, moved = [], []
    for offloads in (False, True):
        settings = config("nvme", tmp_path) | {"tiering": {"activations": "host", "cache_in_host": False}}
        options = {"tiering_config": settings, "activation_offloading": offloads}
        trainer = sft(TieredSFTTrainer, tmp_path / str(offloads), tokenizer, 4, **options)
        trainer.train()
        states.append(state(trainer))
        moved.append(trainer.engine.snapshot().activations.moved)
        groups = trainer.engine._schedule._saved.owners.keys()
        trainer.engine.close()
    assert different(*states) == []
    assert moved[0] > 0 and moved[1] == 0
    # The parameters of a group are no activations.
    assert copied and groups and copied.isdisjoint(groups)
    (warning,) = [record.message for record in caplog.records if "activation_offloading" in record.message]
    assert "tiering.activations moves no activation of this model" in warning


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_reference_model_has_an_engine_of_its_own(name: str, tokenizer: Any, tmp_path: Path) -> None:
    make, stock, tiered = MAKERS[name]
    plain = make(stock, tmp_path / "stock", tokenizer, 4)
    plain.train()
    settings = config("nvme", tmp_path)
    options = {"tiering_config": settings, "tiering_reference_config": settings}
    trainer = make(tiered, tmp_path / "out", tokenizer, 4, **options)
    trainer.train()
    assert list(differences(trainer, plain, 1e-6, 1e-8 if name == "grpo" else 0.0)) == []
    # The parameters of the reference model have no memory outside its engine.
    assert type(trainer.ref_model).__name__ == "ModuleFront"
    assert trainer.accelerator.unwrap_model(trainer.ref_model) is trainer.ref_model.module
    trainer.end()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tokenizer: Any, tmp_path: Path) -> None:
    make, _, tiered = MAKERS[name]
    options = {"tiering_config": config("nvme", tmp_path), "save_strategy": "steps", "save_steps": 2}
    states, figures = [], []
    for saved in (None, str(tmp_path / "out/checkpoint-2")):
        trainer = make(tiered, tmp_path / "out", tokenizer, 4, **options)
        trainer.train(resume_from_checkpoint=saved)
        states.append(state(trainer))
        figures.append(reported(trainer))
        trainer.engine.close()
    assert different(*states) == []
    assert figures[0] == figures[1]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MAKERS)
@under_shim()
def test_a_run_with_deepspeed_reports_what_trl_reports(
    name: str, stage: int, adapter: bool, tmp_path: Path
) -> None:
    make, stock, _ = MAKERS[name]
    peft = LoraConfig(**LORA) if adapter else None
    plain = make(stock, tmp_path, bytewise(), 2, peft)
    plain.train()
    forget_process()
    settings = ds_config(stage, "optimizer", "scheduler")
    # With use_cpu, transformers would not use DeepSpeed.
    trainer = make(stock, tmp_path, bytewise(), 2, peft, deepspeed=settings, use_cpu=False)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    assert sum("loss" in entry for entry in reported(trainer)) == 2
    assert list(differences(trainer, plain, 1e-6, 1e-8 if name == "grpo" else 0.0)) == []


def ranked(rank: int, out: Path, name: str, place: str | None) -> list[dict[str, float]]:
    """What a run of 20 steps reports; ``place`` None is the stock trainer."""
    warnings.simplefilter("ignore")
    make, stock, tiered = MAKERS[name]
    if place is None:
        trainer = make(stock, out / str(rank), bytewise(), 20)
    else:
        trainer = make(tiered, out / str(rank), bytewise(), 20, tiering_config=config(place, out))
    trainer.train()
    if place is not None:
        trainer.engine.close()
    return reported(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_two_ranks_report_what_trl_reports(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        for folder in (tmp_path / "stock", tmp_path):
            from_directory(folder / str(rank))
    pool = Pool(2, tmp_path / "ranks")
    try:
        plain = pool.run(ranked, tmp_path / "stock", name, None)
        for place in PLACES:
            for ours, theirs in zip(pool.run(ranked, tmp_path, name, place), plain, strict=True):
                for entry, expected in zip(ours, theirs, strict=True):
                    assert entry == pytest.approx(expected, rel=1e-5, abs=1e-7), place
    finally:
        pool.close()
