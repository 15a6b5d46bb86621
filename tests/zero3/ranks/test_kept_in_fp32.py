"""Parameters that stay fp32 among others in 16 bits, with several ranks, in every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero3.routed import KEEP, Routed, shares

from .pool import Pool
from .training import start, train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACES: dict[int, list[dict[str, Any]]] = {
    0: [{}],
    1: [{}, {"offload_optimizer": "nvme", "cache_in_host": False}],
    2: [{}, {"offload_optimizer": "cpu", "sub_group_size": 2048}],
    3: [{}, STREAMED, {**STREAMED, "threshold": 0, "prefetch": 0}],
}


@pytest.mark.parametrize("accumulation", [2, 1])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_no_placement_changes_a_bit(ranks: Ranks, nvme: Path, stage: int, accumulation: int) -> None:
    settings = {"build": Routed, "data": shares, "precision": "bf16", "keep_fp32": KEEP, "stage": stage}
    expected = None
    for place in PLACES[stage]:
        runs = ranks(2).run(train, nvme, accumulation=accumulation, **settings, **place)
        assert runs[0].differing(runs[1], losses=False) == [], place
        if expected is not None:
            assert runs[0].differing(expected) == [], place
        expected = expected or runs[0]
    assert expected is not None and len({*expected.losses}) == len(expected.losses)
    for name, values in expected.weights.items():
        is_fp32 = any(word in name for word in KEEP)
        assert values.dtype is (torch.float32 if is_fp32 else torch.bfloat16), name
        assert not is_fp32 or torch.equal(values, expected.masters[name]), name


def mean_gradient(rank: int, nvme: Path, stage: int) -> list[bool]:
    """Whether what a step of SGD takes from each kept parameter is the mean of the ranks' gradients, in fp32."""
    settings: dict[str, Any] = {"rule": "SGD", "optimizer": {"lr": 0.5}, "clip": 0.0, "stage": stage}
    with start(nvme, Routed, precision="bf16", keep_fp32=KEEP, **settings) as engine:
        torch.manual_seed(3)
        model = Routed()
        fp32_names = [name for name, _ in model.named_parameters() if any(word in name for word in KEEP)]
        for name, param in model.named_parameters():
            param.data = param.data if name in fp32_names else param.data.bfloat16()
        before = {name: model.get_parameter(name).detach().clone() for name in fp32_names}
        (both,) = shares(1, 2)
        total = {}
        for number, (tokens,) in enumerate(both):
            model.zero_grad()
            model(tokens).backward()
            for name in fp32_names:
                grad = model.get_parameter(name).grad
                assert grad is not None
                total[name] = total[name] + grad if number else grad
        engine.backward(engine(*both[rank]))
        engine.step()
        return [
            torch.equal(engine.get_fp32_parameter(name), before[name] - 0.5 * (total[name] * 0.5))
            for name in fp32_names
        ]


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_gradients_are_reduced_in_fp32(ranks: Ranks, nvme: Path, stage: int) -> None:
    for answers in ranks(2).run(mean_gradient, nvme, stage):
        assert answers == [True] * len(answers) and len(answers) > 8
