"""Scripts with two engines on several ranks: a teacher that does not train, and a loss that passes both."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tiering as deepspeed
from tests.zero3.engine.test_script_styles import engine_of, gan, maybe_zero_3, perceptrons
from tests.zero3.plain import differing

from .pool import Pool

Ranks = Callable[[int], Pool]


def distilled(rank: int, stage: int) -> tuple[bool, dict[str, Tensor]]:
    """Whether the teacher answered as its plain copy would, and what has become of the student."""
    student = engine_of(perceptrons()[0], stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    model: nn.Module = perceptrons()[0]
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tiering": {"telemetry": {"enabled": False}},
    }
    teacher = deepspeed.initialize(model=model, config=config)[0]
    right, generator = True, torch.Generator().manual_seed(rank)
    with student, teacher:
        for _ in range(3):
            data = torch.randn(4, 8, generator=generator)
            with torch.no_grad():
                expected = teacher(data)
                right = right and torch.equal(expected, plain(data))
            student.backward((student(data) - 2 * expected).square().mean())
            student.step()
        weights = {name: maybe_zero_3(param) for name, param in teacher.named_parameters()}
        right = right and differing(weights, dict(plain.named_parameters())) == []
        return right, student.master_state_dict()


def test_a_teacher_on_two_ranks(ranks: Ranks) -> None:
    pool = ranks(2)
    whole, sharded = pool.run(distilled, 0), pool.run(distilled, 3)
    assert [right for right, _ in (*whole, *sharded)] == [True] * 4
    assert all(differing(whole[0][1], state) == [] for _, state in (*whole, *sharded))


def fooled(rank: int, stage: int) -> list[float]:
    critic, generator = (engine_of(model, stage) for model in perceptrons())
    with critic, generator:
        return gan(
            critic, generator, (critic.backward, generator.backward), (critic.step, generator.step), rank
        )


def test_a_gan_on_two_ranks(ranks: Ranks) -> None:
    """The critic's gradients from the other's loss are reduced, or wait, and are dropped, on all ranks."""
    pool = ranks(2)
    assert pool.run(fooled, 0) == pool.run(fooled, 3) == pool.run(fooled, 1)
