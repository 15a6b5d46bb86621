"""Trainers of a tiny model, on the engine and without it, and what their runs report."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before transformers is imported: tests do not use the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tiering.integrations.transformers import TieringTrainer, TieringTrainerMixin

VOCABULARY, LENGTH = 96, 12
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
REPORTED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def llama(seed: int = 3, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | sizes
        | options
    )
    return LlamaForCausalLM(config)


def sentences(count: int, seed: int = 7) -> list[dict[str, Tensor]]:
    """Token sequences that a model can learn: each token follows from the one before it."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, VOCABULARY, (count, 1), generator=generator)
    tokens = (first + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3) + 3
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def config(place: str, nvme: Path, stage: int = 3, **more: Any) -> dict[str, Any]:
    """A configuration with everything at ``place``, without an optimizer: the Trainer's is used."""
    sections = copy.deepcopy(PLACES[place])
    for section in sections.values():
        if section["device"] == "nvme":
            section["nvme_path"] = str(nvme)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | sections
    return {"zero_optimization": zero} | more


def arguments(output: Path, **options: Any) -> TrainingArguments:
    given = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "warmup_steps": 2,
    }
    return TrainingArguments(output_dir=str(output), **given | options)


def stock(output: Path, model: nn.Module | None = None, **options: Any) -> Trainer:
    return Trainer(**_parts(output, model, **options))


def tiered(
    output: Path,
    settings: Any,
    model: nn.Module | None = None,
    cls: type[TieringTrainer] = TieringTrainer,
    **options: Any,
) -> TieringTrainer:
    weights = options.pop("tiering_weights", None)
    return cls(tiering_config=settings, tiering_weights=weights, **_parts(output, model, **options))


def _parts(output: Path, model: nn.Module | None, **options: Any) -> dict[str, Any]:
    names = ("callbacks", "compute_metrics", "data_collator", "model_init", "optimizers")
    names += ("train_dataset", "eval_dataset")
    given = {name: options.pop(name) for name in names if name in options}
    if "model_init" not in given:
        given["model"] = llama() if model is None else model
    data = {"train_dataset": sentences(64), "eval_dataset": sentences(8, seed=8)}
    return {"args": arguments(output, **options), **data, **given}


class TieredSeq2SeqTrainer(TieringTrainerMixin, Seq2SeqTrainer): ...


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=96, decoder_start_token_id=0, **sizes))


def seq2seq(cls: type, output: Path, **more: Any) -> Any:
    args = Seq2SeqTrainingArguments(
        str(output),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        predict_with_generate=True,
        generation_max_length=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return cls(t5(), args, train_dataset=sentences(16), eval_dataset=sentences(4, seed=8), **more)


def reported(trainer: Any) -> list[dict[str, float]]:
    """The figures of the logs that a stock Trainer has as well, in their order."""
    return [
        {name: entry[name] for name in REPORTED if name in entry}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]


def state(trainer: Any) -> dict[str, Tensor]:
    """Masters and moments by name."""
    engine = trainer.engine
    trained = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    moments = {
        f"{kind} of {name}": engine.get_fp32_state(name, kind)
        for name in trained
        for kind in engine.state_names
    }
    return {**engine.master_state_dict(), **moments}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors that differ in a bit, or that one side lacks."""
    names = one.keys() ^ other.keys()
    return sorted(names | {name for name in one.keys() & other.keys() if not one[name].equal(other[name])})


def differences(trainer: Any, other: Any, relative: float, absolute: float = 0.0) -> Iterator[str]:
    """The reported figures that differ by more than both tolerances; also if one of both lacks some."""
    ours, theirs = reported(trainer), reported(other)
    if [list(entry) for entry in ours] != [list(entry) for entry in theirs]:
        yield f"{[list(entry) for entry in ours]} and {[list(entry) for entry in theirs]}"
    for step, (entry, expected) in enumerate(zip(ours, theirs, strict=False)):
        for name in entry:
            if not abs(entry[name] - expected[name]) <= max(relative * abs(expected[name]), absolute):
                yield f"{name} of entry {step} is {entry[name]!r}, not {expected[name]!r}"
