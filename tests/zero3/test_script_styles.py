"""Scripts of other kinds than the tutorial's: teachers, and loops that keep old habits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering as deepspeed
from tiering.errors import ConfigError, EngineStateError


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_an_engine_without_an_optimizer_answers_and_does_not_train(
    start: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    tmp_path: Path,
    home: str,
) -> None:
    """A teacher, or the reference of RLHF: no state, no gradients, and the weights of a run that trained."""
    batches = [*micro_batches(3)]
    trained = start(precision="fp32", accumulation=1, offload_param=home)
    trained.backward(trained(*batches[0]))
    trained.step()
    trained.save_checkpoint(tmp_path)
    with torch.no_grad():
        wanted = [trained(*batch) for batch in batches]

    torch.manual_seed(4)
    model = small_model()
    plain = copy.deepcopy(model)
    teacher = start(model, precision="fp32", rule=None, offload_param=home)
    assert torch.equal(teacher.eval()(*batches[0]), plain(*batches[0]))
    assert not any(param.requires_grad for param in teacher.parameters())
    path, _ = teacher.load_checkpoint(tmp_path)
    assert path is not None
    assert all(torch.equal(teacher(*batch), loss) for batch, loss in zip(batches, wanted, strict=True))
    assert teacher.plan.workload.state_tensors == 0 and teacher.get_lr() == [0.0]
    for call in (lambda: teacher.backward(torch.zeros((), requires_grad=True)), teacher.step):
        with pytest.raises(EngineStateError, match="without an optimizer"):
            call()


def test_a_teacher_lets_gradients_through() -> None:
    torch.manual_seed(4)
    critic = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 1))
    plain = copy.deepcopy(critic)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(
        model=critic, config=config | {"tiering": {"telemetry": {"enabled": False}}}
    )[0]
    given, same = (torch.ones(2, 6, requires_grad=True) for _ in range(2))
    engine(given).sum().backward()
    plain(same).sum().backward()
    assert given.grad is not None and same.grad is not None and torch.equal(given.grad, same.grad)
    engine.close()


def test_parameters_without_an_optimizer_are_a_mistake(
    start: Callable[..., Any], small_model: type[nn.Module]
) -> None:
    model = small_model()
    message = r"name one in the configuration's optimizer section .* or pass a torch opt"
    with pytest.raises(ConfigError, match=message):
        start(model, model_parameters=model.parameters(), rule=None)
    assert all(param.requires_grad and bool(param.isfinite().all()) for param in model.parameters())
