"""generate() with other lengths on each rank: in stage 3 every token is a forward of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import models
from .pool import Pool
from .training import start

Ranks = Callable[..., Pool]


class Writer(models.Blocks):
    """As much of transformers' generate as matters: who is done goes on while others are not, if told to."""

    def generate(self, x: Tensor, count: int, synced_gpus: bool | None = None) -> tuple[int, bool | None]:
        calls = 0
        while True:
            ranks_left = torch.tensor(float(count > calls))
            if synced_gpus:
                dist.all_reduce(ranks_left)
            if not ranks_left.item():
                return calls, synced_gpus
            self(x)
            calls += 1


class Adapted(nn.Module):
    """Hands everything on, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Writer()

    def forward(self, x: Tensor) -> Any:
        return self.base(x)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.generate(*args, **kwargs)


class Other(models.Blocks):
    def generate(self, x: Tensor, count: int) -> str:
        return f"{count} of its own"


def written(rank: int, nvme: Path, build: Any, *, more: int = 3, **options: Any) -> list[Any]:
    """What generate gives for 2 tokens, ``more`` on rank 1, and that ranks are in step behind it."""
    arguments = options.pop("given", {})
    ((x,), _), *_ = models.vectors(1, 2)
    with start(nvme, build, threshold=0, **options) as engine, torch.no_grad():
        shapes = [engine.generate(x, 2 + more * rank, **arguments)]
        engine.eval()
        shapes.append(engine(x).shape)
        return shapes


def test_ranks_go_on_until_the_last_has_its_tokens(ranks: Ranks, nvme: Path) -> None:
    for build in (Writer, Adapted):
        assert ranks(2).run(written, nvme, build, stage=3) == [[(5, True), ()]] * 2


def test_parameters_that_are_whole_need_no_other_rank(ranks: Ranks, nvme: Path) -> None:
    assert ranks(2).run(written, nvme, Writer, stage=2) == [[(2, None), ()], [(5, None), ()]]


def test_what_a_caller_says_counts(ranks: Ranks, nvme: Path) -> None:
    case = {"stage": 3, "more": 0, "given": {"synced_gpus": False}}
    assert ranks(2).run(written, nvme, Writer, **case) == [[(2, False), ()]] * 2


def test_a_generate_of_another_kind_is_called_as_it_is(ranks: Ranks, nvme: Path) -> None:
    assert [shapes[0] for shapes in ranks(2).run(written, nvme, Other, stage=3)] == [
        "2 of its own",
        "5 of its own",
    ]


def llama(rank: int) -> list[int]:
    """The lengths of what transformers has written, and that training goes on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import tiering  # here: its import takes seconds, which other tests' ranks need not spend

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "tiering": {"device_budget": "64MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}},
    }
    tokens = torch.arange(16).view(2, 8) + rank
    lengths = []
    with tiering.initialize(model=model, config=settings).engine as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            written = engine.generate(input_ids=tokens[:1], max_new_tokens=3 + 4 * rank, do_sample=False)
            lengths.append(written.shape[1] - 8)
    return lengths


@pytest.mark.slow  # the import of transformers
def test_transformers_on_two_ranks(doomed: Ranks) -> None:
    assert doomed(2).run(llama) == [[3, 3], [7, 7]]
