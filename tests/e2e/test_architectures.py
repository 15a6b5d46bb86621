"""Models as people bring them: each trains as in a plain PyTorch loop, and to the same bits wherever its state lives.

What each model is, and what a batch of it looks like, is in architectures.py; how one is trained, in conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

from optim_cpu.formats import split
from tests.crossed import crossed
from tiering.placement.workload import Tier
from tiering.storage.arena import PAGE
from zero3.passes import moved_activations

from .architectures import ARCHITECTURES, batches, build
from .conftest import STEPS, Habit

# transformers renames what everybody calls, peft among them.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

LR, DECAY = 1e-3, 0.1
ON_NVME = {"offload_param": "nvme", "offload_optimizer": "nvme"}
STREAMED = {**ON_NVME, "cache_in_host": False}

SMALLEST = "smallest budgets"
# A share of 0 is the smallest budget that the plan accepts, 1 has room for everything.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "optimizer on nvme": {"offload_optimizer": "nvme", "cache_in_host": False},
    "part of the optimizer on nvme": {"offload_optimizer": "nvme", "ratio": 0.4, "cache_in_host": False},
    "parameters on nvme": {"offload_param": "nvme", "cache_in_host": False},
    "nvme": STREAMED,
    "nvme, no prefetch": {**STREAMED, "prefetch": 0},
    "much in host": {**ON_NVME, "host_share": 0.75},
    "little in host, no prefetch": {**ON_NVME, "host_share": 0.12, "prefetch": 0},
    "activations on nvme": {**STREAMED, "activations": "nvme", "activation_budget": "128KiB"},
    "activations in host": {**STREAMED, "activations": "host", "activation_budget": "8MiB"},
    SMALLEST: {**STREAMED, "host_share": 0.0, "device_share": 0.0},
}
CHECKPOINTING = ["no", "reentrant", "not reentrant"]
SELDOM = ["t5", "lora"]
DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.generates]


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 2048)


def plain_loop(
    model: Any, name: str, optimizer: torch.optim.Optimizer, accumulation: int
) -> tuple[list[float], list[float]]:
    """Losses and norms of what everybody writes first."""
    losses, norms = [], []
    for number, batch in enumerate(batches(name, STEPS * accumulation), start=1):
        loss = model(**batch).loss
        losses.append(loss.item())
        (loss / accumulation).backward()
        if number % accumulation == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize(
    "name", [name if name in SELDOM else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_adamw_differs_from_a_plain_loop_by_rounding(train: Callable[..., Any], name: str) -> None:
    """What an architecture changes is its gradients: SGD, below, shows more of those."""
    model = build(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY)
    losses, norms = plain_loop(model, name, adamw, accumulation=1)
    run = train(name, Habit("fp32", 1), **STREAMED)
    assert run.losses == pytest.approx(losses, rel=1e-4)
    assert run.norms == pytest.approx(norms, rel=1e-3)
    assert set(run.masters) == {n for n, p in model.named_parameters() if p.requires_grad}
    for key, value in run.masters.items():
        # An element whose gradient is rounding noise may step either way, by lr at most.
        assert float((value - model.get_parameter(key).detach()).abs().max()) <= 2 * LR * STEPS, key


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sgd_differs_from_a_plain_loop_by_rounding(train: Callable[..., Any], name: str) -> None:
    model = build(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    losses, norms = plain_loop(model, name, torch.optim.SGD(trained, **options), accumulation=2)
    optimizer = {"type": "SGD", "params": options}
    run = train(name, Habit("fp32", 2), optimizer=optimizer, **STREAMED)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.norms == pytest.approx(norms, rel=1e-4)
    for key, value in run.masters.items():
        torch.testing.assert_close(value, model.get_parameter(key).detach(), rtol=1e-4, atol=1e-5)


def assert_same_bits(run: Any, reference: Any) -> None:
    assert run.losses == reference.losses
    assert run.norms == reference.norms
    assert run.differing(reference) == []


def every_placement() -> Iterator[Any]:
    """Fast are, of each architecture, the smallest budgets and two others, which go round."""
    others = [placement for placement in PLACEMENTS if placement != SMALLEST]
    for number, name in enumerate(ARCHITECTURES):
        dealt = {others[(2 * number + more) % len(others)] for more in (0, 1)}
        for placement in PLACEMENTS:
            marks = [] if placement in dealt | {SMALLEST} else [pytest.mark.slow]
            yield pytest.param(name, placement, marks=marks, id=f"{name}-{placement}")


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "placement"), list(every_placement()))
def test_every_placement_gives_the_same_bits(
    train: Callable[..., Any], reference: Callable[..., Any], name: str, placement: str
) -> None:
    habit = Habit("bf16", 1)
    run = train(name, habit, **PLACEMENTS[placement])
    assert_same_bits(run, reference(name, habit))
    io = run.snapshot.io
    assert bool(io and io[0].read.bytes and io[0].written.bytes) == ("nvme" in PLACEMENTS[placement].values())


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_accumulation_in_fp32_gives_the_same_bits(
    train: Callable[..., Any], reference: Callable[..., Any], name: str
) -> None:
    habit = Habit("fp32", 2)
    run = train(name, habit, **PLACEMENTS["little in host, no prefetch"])
    assert_same_bits(run, reference(name, habit))


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    crossed([name for name, each in ARCHITECTURES.items() if each.checkpoints], CHECKPOINTING[1:]),
)
def test_activation_checkpointing_gives_the_same_bits(
    train: Callable[..., Any], reference: Callable[..., Any], name: str, checkpointing: str
) -> None:
    """With room for one block: transformers recomputes a block's forward without calling the block."""
    habit = Habit("bf16", 1, checkpointing)
    on_device = reference(name, habit)
    assert_same_bits(train(name, habit, **PLACEMENTS[SMALLEST]), on_device)
    # A tied weight may add up its gradients in another order.
    assert on_device.norms == pytest.approx(reference(name, Habit("bf16", 1)).norms, rel=1e-2)


# The routers' logits of Mixtral, for its auxiliary loss, are recorded by hooks.
IN_CHUNKS = [name for name in ARCHITECTURES if name != "mixtral"]
# Means over as many tokens in each row, and no row that decides on others.
EVEN = [name for name in IN_CHUNKS if name not in ("bert", "mixture")]


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "checkpointing"), crossed(EVEN, CHECKPOINTING, one_in=3))
def test_chunks_of_rows_give_the_gradients_of_micro_batches(
    start: Callable[..., Any], name: str, checkpointing: str
) -> None:
    """Up to rounding: outside of the blocks, operations on all rows round differently."""
    if checkpointing != "no" and not ARCHITECTURES[name].checkpoints:
        pytest.skip(f"{name} has no activation checkpointing")
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    runs = []
    for habit in (Habit("fp32", 2), Habit("fp32", 1, checkpointing, block_rows=1)):
        engine = start(name, habit, optimizer=optimizer, **STREAMED)
        for batch in batches(name, 3):
            rows = [slice(0, 1), slice(1, 2)] if habit.accumulation == 2 else [slice(None)]
            for part in rows:
                engine.backward(engine(**{key: value[part] for key, value in batch.items()}).loss)
                engine.step()
        runs.append(engine.master_state_dict())
    for key, value in runs[0].items():
        torch.testing.assert_close(runs[1][key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "checkpointing"), crossed(IN_CHUNKS, CHECKPOINTING, one_in=3))
def test_chunks_of_rows_give_the_same_bits_everywhere(
    train: Callable[..., Any], reference: Callable[..., Any], name: str, checkpointing: str
) -> None:
    """With room for one block, whatever is checkpointed."""
    checkpointing = checkpointing if ARCHITECTURES[name].checkpoints else "no"
    habit = Habit("bf16", 1, checkpointing, block_rows=1)
    on_device = reference(name, habit)
    assert_same_bits(train(name, habit, **PLACEMENTS[SMALLEST]), on_device)
    assert on_device.norms == pytest.approx(reference(name, Habit("bf16", 1)).norms, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_habit_at_every_placement_gives_the_same_bits(
    train: Callable[..., Any], reference: Callable[..., Any], name: str, placement: str
) -> None:
    """Nothing persistent here: every bias and norm moves, too."""
    checkpointing = CHECKPOINTING if ARCHITECTURES[name].checkpoints else ["no"]
    for precision, accumulation, saved in product(["bf16", "fp32"], [1, 2], checkpointing):
        habit = Habit(precision, accumulation, saved)
        run = train(name, habit, threshold=0, **PLACEMENTS[placement])
        assert_same_bits(run, reference(name, habit))


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        ("part of the optimizer on nvme", "optimizer state"),
        ("much in host", "optimizer state"),
        ("little in host, no prefetch", "parameters"),
    ],
)
def test_fractions_are_fractions(start: Callable[..., Any], placement: str, kind: str) -> None:
    """What the placements in between are for: state of one kind on two tiers."""
    plan = start("llama", Habit("bf16", 1), **PLACEMENTS[placement]).plan
    holding = [tier for tier in Tier if kind in plan.contents(tier)]
    assert Tier.NVME in holding and len(holding) > 1


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "placement"), crossed(DECODERS, ["cpu", "nvme", SMALLEST]))
def test_generate_gives_the_plain_models_tokens_and_disturbs_nothing(
    train: Callable[..., Any], reference: Callable[..., Any], name: str, placement: str
) -> None:
    habit = Habit("bf16", 1)
    prompt = next(batches(name, 1))["input_ids"][:, :6]
    options = {"input_ids": prompt, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    outputs = []

    def generate(engine: Any, step: int) -> None:
        if step not in (0, 3):
            return
        plain = build(name).eval()
        for parameter in plain.parameters():
            parameter.data = parameter.data.bfloat16()
        plain.load_state_dict(engine.state_dict())
        engine.eval()
        outputs.append(engine.module.generate(**options))
        engine.train()
        assert outputs[-1].equal(plain.generate(**options))

    run = train(name, habit, before_step=generate, **PLACEMENTS[placement])
    assert outputs[0].shape[1] >= 5
    assert_same_bits(run, reference(name, habit))


def test_a_frozen_base_is_read_and_never_written(
    train: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    """LoRA: no optimizer state, no gradient and no byte written for what is frozen."""
    original = {name: p.detach() for name, p in build("lora").named_parameters()}
    adapters = {name for name in original if "lora_" in name}
    trained = sum(original[name].numel() for name in adapters)
    assert trained < 0.02 * sum(p.numel() for p in original.values())
    written = []

    def count(engine: Any, step: int) -> None:
        engine.state_dict(), engine.master_state_dict()  # these reads wait for every write
        written.append(engine.snapshot().io[0].written.bytes)

    run = train("lora", Habit("bf16", 1), before_step=count, threshold=0, **STREAMED)
    plan = run.engine.plan
    per_step = plan.nvme_traffic()[1]
    assert [after - before for before, after in pairwise(written)] == [per_step] * (STEPS - 1)
    assert 0 < per_step - plan.contents(Tier.NVME)["optimizer state"] <= len(adapters) * PAGE
    assert plan.contents(Tier.NVME)["parameters"] > len(original) * PAGE
    assert_same_bits(run, reference("lora", Habit("bf16", 1)))
    assert set(run.masters) == adapters
    for name, value in original.items():
        assert run.weights[name].equal(split(value)[0]) == (name not in adapters), name
