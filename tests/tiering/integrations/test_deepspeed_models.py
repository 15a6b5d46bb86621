"""Models that transformers builds and loads under ZeRO-3, under the shim; test_deepspeed_trainer.py has the names."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    GPTJModel,
)
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

from .shimmed import under_shim
from .test_models import WithHead, moe, tied, variance_scaled
from .trainers import different, llama

pytestmark = pytest.mark.slow

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "": torch.float32}


def settings(stage: int, half: str) -> dict[str, Any]:
    halves = {half: {"enabled": True}} if half else {}
    return {"train_batch_size": 1, "zero_optimization": {"stage": stage}} | halves


@contextmanager
def zero_stage(stage: int, half: str = "") -> Iterator[None]:
    """transformers builds and loads models for DeepSpeed in the block."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    # transformers has a weak reference to it.
    remembered = HfDeepSpeedConfig(settings(stage, half))
    assert remembered.is_zero3() == is_deepspeed_zero3_enabled() == (stage == 3)
    yield
    del remembered
    assert not is_deepspeed_zero3_enabled()


@contextmanager
def messages() -> Iterator[list[str]]:
    """What transformers tells when it loads a model."""
    texts: list[str] = []
    logger, handler = logging.getLogger("transformers.modeling_utils"), logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(level)


DETECTED = "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters, and buffers."""
    from deepspeed.zero import GatheredParameters

    with GatheredParameters([*model.parameters()]):
        parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {**parameters, **dict(model.named_buffers())}


@pytest.mark.parametrize("half", HALVES)
@under_shim()
def test_init_zero3(half: str, tmp_path: Path) -> None:
    import deepspeed

    tied().save_pretrained(tmp_path)
    for stage in (3, 2):
        with zero_stage(stage, half), messages() as lines:
            model = AutoModel.from_pretrained(tmp_path)
        assert (DETECTED in lines) == (stage == 3)
        # Unlike DeepSpeed, the parameters keep their digits for the masters until an engine has them.
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        engine = deepspeed.initialize(model=model, config=settings(stage, half))[0]
        assert {param.dtype for param in model.parameters()} == {HALVES[half]}
        engine.destroy()


def gpt2_config(**options: Any) -> GPT2Config:
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96, **tokens, **options)


@under_shim()
def test_from_config_zero3_weight_init(tmp_path: Path) -> None:
    models = []
    for stage, options in ((0, {"dtype": torch.bfloat16}), (3, {})):
        torch.manual_seed(42)
        with zero_stage(stage, "bf16"):
            models.append(values(AutoModelForCausalLM.from_config(gpt2_config(), **options)))
    plain, found = models
    assert found.keys() == plain.keys()
    # The random numbers differ, because transformers initialises modules in another order.
    for name, value in plain.items():
        (spread, mean), (expected, other) = [
            (each.float().std().item(), each.float().mean().item()) for each in (found[name], value)
        ]
        assert spread == pytest.approx(expected, rel=0.3), name
        assert mean == pytest.approx(other, abs=0.02), name


@pytest.mark.parametrize("stage", [3, 2])
@under_shim()
def test_init_zero3_missing_params(stage: int, tmp_path: Path) -> None:
    saved = llama()
    saved.save_pretrained(tmp_path)
    with zero_stage(stage), messages() as lines:
        model = WithHead.from_pretrained(tmp_path)
    assert (DETECTED in lines) == (stage == 3)
    report = "\n".join(lines)
    for name in ("new_head.weight", "new_head.bias"):
        assert any(name in row and "MISSING" in row for row in report.splitlines()), report
    found = values(model)
    assert (found.pop("new_head.weight") == -100).all()
    assert (found.pop("new_head.bias") == 100).all()
    assert different(found, values(saved)) == []


@under_shim()
def test_arange_bf16(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "n_positions": 512}
    GPTJModel(GPTJConfig(**sizes)).save_pretrained(tmp_path)
    with zero_stage(3, "bf16"), messages() as lines:
        model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert DETECTED in lines
    # The angles of 512 positions have more digits than bfloat16.
    expected = create_sinusoidal_positions(512, 8)
    assert expected.dtype == torch.float32
    # Of each attention, or of the model since transformers 5.24.
    (name,) = [name for name, _ in model.named_buffers() if name.endswith("embed_positions")]
    assert model.get_buffer(name).equal(expected)


@under_shim()
def test_init_zero3_moe_weight_conversion(tmp_path: Path) -> None:
    model = moe()
    expected = copy.deepcopy(dict(model.named_parameters()))
    model.save_pretrained(tmp_path)
    with zero_stage(3), messages() as lines:
        loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert DETECTED in lines
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = values(loaded)
    # The experts of a layer, separate in the files, are one parameter.
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 32, 32)
    assert different({name: found[name] for name in expected}, expected) == []


@under_shim()
def test_init_zero3_variance_scaling(tmp_path: Path) -> None:
    model = variance_scaled()
    model.save_pretrained(tmp_path)
    with zero_stage(3), messages() as lines:
        loaded = type(model).from_pretrained(tmp_path)
    assert DETECTED in lines
    assert different(values(loaded), values(model)) == []


@under_shim()
def test_resize_token_embeddings_zero3(tmp_path: Path) -> None:
    saved = tied()
    saved.save_pretrained(tmp_path)
    with zero_stage(3, "bf16"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.resize_token_embeddings(106)
    found = values(model)["transformer.wte.weight"]
    assert found.shape == (106, 32)
    assert found[:96].equal(saved.transformer.wte.weight)
    # The new tokens have the mean of the others.
    assert torch.allclose(found[96:].mean(0), found[:96].mean(0), atol=0.02)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
