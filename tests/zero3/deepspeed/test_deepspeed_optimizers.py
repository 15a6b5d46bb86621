"""Optimizers with DeepSpeed's constructors, checkpointing, the accelerator, and what scripts log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering as deepspeed
from tests.zero3.conftest import NVME_STATE
from tests.zero3.tutorial import WIDTH, net
from tiering.errors import ConfigError

from .deepspeed_signatures import module_of

ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
OPTIMIZERS = [
    ("adam", "DeepSpeedCPUAdam", "AdamW", {}, ADAM),
    ("adam", "DeepSpeedCPUAdam", "Adam", {"adamw_mode": False}, ADAM),
    ("adam", "DeepSpeedCPUAdam", "AdamW", {}, ADAM | {"bias_correction": False}),
    ("adam", "FusedAdam", "AdamW", {}, ADAM),
    ("adam", "FusedAdam", "AdamW", {}, ADAM | {"bias_correction": False}),
    ("adam", "FusedAdam", "Adam", {"adam_w_mode": False, "set_grad_none": False}, ADAM),
    ("lion", "DeepSpeedCPULion", "Lion", {}, {"lr": 0.01, "weight_decay": 0.1}),
    ("lion", "FusedLion", "Lion", {"set_grad_none": False}, {"lr": 0.01, "weight_decay": 0.1}),
    ("adagrad", "DeepSpeedCPUAdagrad", "Adagrad", {}, {"lr": 0.01, "weight_decay": 0.1}),
]


def steps(engine: Any, count: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).pow(2).mean())
        engine.step()
    state: dict[str, Tensor] = engine.master_state_dict()
    return state


@pytest.mark.parametrize(("module", "name", "named", "mode", "options"), OPTIMIZERS)
def test_an_optimizer_that_is_given_is_the_one_that_is_named(
    start: Callable[..., Any],
    module: str,
    name: str,
    named: str,
    mode: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Taken over, and stepping by itself."""
    kind = getattr(module_of("tiering", f"ops.{module}"), name)
    model, alone = net(), net()
    common: dict[str, Any] = {"precision": "fp32", "accumulation": 1, "clip": 0.0}
    engine = start(model, client=kind(model.parameters(), **mode, **options), rule=None, **common)
    assert engine.optimizer_name() == name and len(engine.get_mom()) == 1
    passed = steps(engine)
    if named == "Adam":  # which DeepSpeed reads as AdamW, unless
        options = options | {"adam_w_mode": False}
    expected = steps(start(net(), rule=named, optimizer=options, **common))
    assert [name for name in expected if not torch.equal(expected[name], passed[name])] == []

    optimizer = kind(
        alone.parameters(), **mode, **{key: options[key] for key in options if key != "adam_w_mode"}
    )
    # Its own step is torch's, which loads a compiler for two seconds.
    if isinstance(optimizer, torch.optim.Adam):
        next(alone.parameters()).grad = torch.ones(32, WIDTH)
        optimizer.zero_grad()
        assert (next(alone.parameters()).grad is None) is mode.get("set_grad_none", True)
        return
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        alone(torch.randn(4, WIDTH, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in alone.named_parameters():
        assert (param - expected[name]).abs().max() < 1e-6, name


def test_moments_without_bias_correction_are_the_same_on_every_tier(start: Callable[..., Any]) -> None:
    common: dict[str, Any] = {"rule": "AdamW", "precision": "fp32", "accumulation": 1, "clip": 0.0}
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-12, "weight_decay": 0.0}
    uncorrected = common | {"optimizer": options | {"bias_correction": False}}
    on_device = steps(start(net(), **uncorrected))
    for placement in ({"offload_optimizer": "cpu"}, NVME_STATE | {"cache_in_host": False}):
        elsewhere = steps(start(net(), **uncorrected, **placement))
        assert all(torch.equal(value, elsewhere[name]) for name, value in on_device.items())
    # In the first step the moments are (1 - beta1) g and (1 - beta2) g^2: the step is 3.16 times the corrected one.
    start_values = steps(start(net(), **common), 0)
    first = steps(start(net(), **uncorrected), 1)
    corrected = steps(start(net(), **common, optimizer=options), 1)
    for name, value in start_values.items():
        # The corrected first step is the learning rate, where there is a gradient.
        moved = (corrected[name] - value).abs() > 0.009
        ratio = (first[name] - value)[moved] / (corrected[name] - value)[moved]
        assert moved.any() and torch.allclose(ratio, torch.tensor(0.1 / 0.001**0.5), rtol=1e-3), name


def test_options_of_optimizers_that_nothing_does_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    adam = deepspeed.ops.adam
    for kind in (adam.DeepSpeedCPUAdam, adam.FusedAdam):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\(amsgrad=True\)"):
            kind(params, amsgrad=True)
    params[0].grad = torch.ones(2)
    with pytest.raises(ConfigError, match="torch's Adam, which corrects the bias; pass the optimizer to"):
        adam.FusedAdam(params, bias_correction=False).step()
    for kind in (
        adam.DeepSpeedCPUAdam,
        deepspeed.ops.lion.DeepSpeedCPULion,
        deepspeed.ops.adagrad.DeepSpeedCPUAdagrad,
    ):
        with pytest.raises(ConfigError, match='"state": "bf16"'):
            kind(params, fp32_optimizer_states=False)


# Activations, the device, what is said


def test_a_checkpointed_function_gives_the_same_and_is_computed_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, runs = deepspeed.checkpointing, list[int]()
    monkeypatch.setattr("zero3.deepspeed.checkpointing._options", None)
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor, *, scale: float = 1.0) -> Tensor:
        runs.append(1)
        return torch.dropout(x @ weight, 0.5, train=True) * scale

    gradients = []
    for call in (function, lambda *args, **kwargs: checkpointing.checkpoint(function, *args, **kwargs)):
        torch.manual_seed(4)
        call(torch.ones(2, 4), scale=3.0).sum().backward()  # an input that requires no gradient
        gradients.append(weight.grad.clone())
        weight.grad = None
    assert torch.equal(*gradients) and len(runs) == 3
    with caplog.at_level(logging.INFO, "zero3"):
        checkpointing.configure(
            None, deepspeed_config=None, partition_activations=True, checkpoint_in_cpu=True
        )
        checkpointing.configure(None, partition_activations=True)
    assert checkpointing.is_configured()
    assert caplog.text.count("partition_activations: no effect") == 1
    checkpointing.reset()


def test_the_accelerator_answers_on_a_machine_without_a_gpu() -> None:
    cpu = deepspeed.get_accelerator.__wrapped__()  # not the one that was made first, perhaps for a GPU
    assert (cpu.device_name(), cpu.device_name(0), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.device_count() == 1 and cpu.is_available() and cpu.communication_backend_name() == "gloo"
    assert cpu.is_bf16_supported() and cpu.is_fp16_supported() and torch.bfloat16 in cpu.supported_dtypes()
    cpu.set_device(0)
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()
    assert cpu.memory_allocated() == cpu.max_memory_allocated() == cpu.memory_reserved(0) == 0
    assert 0 < cpu.available_memory() <= cpu.total_memory()
    cpu.manual_seed_all(5)
    first = torch.rand(3)
    cpu.random().manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    tensor = torch.ones(2, device=cpu.current_device())
    assert cpu.on_accelerator(tensor) and cpu.pin_memory(tensor) is tensor and not cpu.is_pinned(tensor)
    with cpu.device(0), cpu.stream(cpu.default_stream()):
        assert cpu.LongTensor([1, 2]).dtype is torch.int64
    with pytest.raises(AttributeError, match="no attribute 'memory_alocated'"):
        cpu.memory_alocated  # noqa: B018 # is what is tried


def test_what_scripts_say_goes_through_our_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tiering"):
        deepspeed.log_dist("to all", ranks=[-1])
        deepspeed.utils.log_dist("to one", ranks=[1])
        deepspeed.utils.logger.info("plain")
        deepspeed.runtime.utils.see_memory_usage("before", force=True)
        deepspeed.runtime.utils.see_memory_usage("never")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "to all",
        "plain",
        "before",
    ]
    assert "GiB" in caplog.text
