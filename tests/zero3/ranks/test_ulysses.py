"""Sequence parallelism: ranks that share sequences train as one process with the whole sequences does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiering
from tests.zero3.conftest import config
from tests.zero3.plain import ADAM
from tiering.sequence import heads_to_tokens, tokens_to_heads, ulysses_attention

from .pool import Pool
from .training import trained_state

Ranks = Callable[[int], Pool]
VOCABULARY, TOKENS, ROWS = 61, 16, 2
LIMIT = 500.0  # seconds: the first task of a rank imports transformers, which takes long on a busy machine
RULES: dict[str, dict[str, Any]] = {"AdamW": ADAM, "SGD": {"lr": 0.1, "momentum": 0.9}}


def build(kind: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), changes.pop("dropout", 0.0))
        settings = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **changes)
        return transformers.GPT2LMHeadModel(settings)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes | changes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def batch(number: int, data_rank: int, *, padded: str = "", tokens: int = TOKENS) -> dict[str, Tensor]:
    """A prompt of another length in each row does not count: the shards have different numbers of labels."""
    generator = torch.Generator().manual_seed(100 * number + data_rank)
    ids = torch.randint(1, VOCABULARY, (ROWS, tokens), generator=generator)
    labels = ids.clone()
    labels[0, : 10 - 3 * data_rank] = -100
    labels[1, : 2 + number % 3] = -100
    whole = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if padded == "left" else slice(-3, None)] = 0
        labels[mask == 0] = -100
        whole["attention_mask"] = mask
    return whole


def train(
    rank: int,
    nvme: Path,
    *,
    kind: str = "llama",
    model: dict[str, Any] | None = None,
    sequence_ranks: int = 2,
    steps: int = 10,
    rule: str = "AdamW",
    accumulation: int = 1,
    checkpointing: bool = False,
    data: dict[str, Any] | None = None,
    pad: int | None = None,
    **options: Any,
) -> tuple[list[float], Any]:
    """Losses of this rank's group, and what training left."""
    built = build(kind, **(model or {}))
    if checkpointing:
        # transformers has renamed it, and warns of the old name.
        enable = getattr(built, "activation_checkpointing_enable", built.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    built.train()
    usual = {"precision": "fp32", "rule": rule, "optimizer": RULES[rule], "accumulation": accumulation}
    with enabled(built, sequence_ranks) as ulysses:
        engine = tiering.initialize(model=built, config=config(nvme, **usual | options)).engine
        torch.manual_seed(5 + rank)  # for dropout
        losses = []
        with engine:
            for number in range(steps * accumulation):
                mine = ulysses.shard(batch(number, ulysses.data_rank, **(data or {})), pad=pad)
                loss = engine(**mine).loss
                engine.backward(loss)
                engine.step()
                losses.append(ulysses.average(loss).item())
            return losses, trained_state(engine, [], [])


@contextmanager
def enabled(model: Any, sequence_ranks: int) -> Any:
    tiering.init_distributed(verbose=False)
    ulysses = ulysses_attention(model, ranks=sequence_ranks)
    try:
        yield ulysses
    finally:
        ulysses.remove()


def whole(
    groups: int,
    *,
    kind: str = "llama",
    model: dict[str, Any] | None = None,
    steps: int = 10,
    rule: str = "AdamW",
    accumulation: int = 1,
    data: dict[str, Any] | None = None,
    **_: Any,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process: the losses of each group's batches, and the weights."""
    built = build(kind, **(model or {})).train()
    options = {key: tuple(value) if key == "betas" else value for key, value in RULES[rule].items()}
    optimizer = getattr(torch.optim, rule)(built.parameters(), **options)
    losses: list[list[float]] = [[] for _ in range(groups)]
    for number in range(steps * accumulation):
        for group in range(groups):
            loss = built(**batch(number, group, **(data or {}))).loss
            losses[group].append(loss.item())
            (loss / groups / accumulation).backward()
        if (number + 1) % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(built.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(built.state_dict())


def assert_as_one_process(pool: Pool, nvme: Path, *, sequence_ranks: int = 2, **case: Any) -> None:
    runs = pool.run(train, nvme, limit=LIMIT, sequence_ranks=sequence_ranks, **case)
    losses, weights = whole(pool.world_size // sequence_ranks, **case)
    assert len(set(losses[0])) == len(losses[0]), "the reference does not train"
    for rank, (own, left) in enumerate(runs):
        assert own == pytest.approx(losses[rank // sequence_ranks], rel=1e-5), f"rank {rank}"
        assert set(left.weights) == set(weights)
        for name, value in weights.items():
            difference = float((left.weights[name] - value).abs().max())
            assert difference <= 1e-5 * float(value.abs().max()), f"rank {rank}, {name}: {difference:.1e}"


def test_two_ranks_train_llama_as_one_process(ranks: Ranks, nvme: Path) -> None:
    assert_as_one_process(ranks(2), nvme, stage=3, rule="AdamW")


def test_two_ranks_train_gpt2_as_one_process(ranks: Ranks, nvme: Path) -> None:
    """With tied embeddings and accumulation."""
    assert_as_one_process(ranks(2), nvme, kind="gpt2", stage=1, rule="SGD", accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_stage_and_rule(
    ranks: Ranks, nvme: Path, kind: str, stage: int, rule: str, accumulation: int
) -> None:
    assert_as_one_process(ranks(2), nvme, kind=kind, stage=stage, rule=rule, accumulation=accumulation)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_data_and_sequence_on_four_ranks(
    ranks: Ranks, nvme: Path, kind: str, stage: int, sequence_ranks: int
) -> None:
    """Four ranks for a sequence are more than Llama's two heads of keys, which are repeated."""
    case = {"kind": kind, "stage": stage, "accumulation": 2}
    assert_as_one_process(ranks(4), nvme, sequence_ranks=sequence_ranks, **case)


MASKS: dict[str, dict[str, Any]] = {
    "padded on the right, eager": {"model": {"attn_implementation": "eager"}, "data": {"padded": "right"}},
    "one head of keys": {"model": {"num_key_value_heads": 1}},
    "eager": {"model": {"attn_implementation": "eager", "num_key_value_heads": 1}},
    "padded on the left": {"data": {"padded": "left"}},
    "a sliding window": {"kind": "mistral", "model": {"sliding_window": 5}},
    "a sliding window, eager": {
        "kind": "mistral",
        "model": {"sliding_window": 5, "attn_implementation": "eager"},
        "data": {"padded": "right"},
    },
    "a length that two does not divide": {"data": {"tokens": 15}, "pad": 0},
    "the same with a mask": {"data": {"tokens": 15, "padded": "right"}, "pad": 0},
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_of_whole_sequences(ranks: Ranks, nvme: Path, case: str) -> None:
    assert_as_one_process(ranks(2), nvme, steps=3, **MASKS[case])


def test_state_on_nvme_changes_no_bit(ranks: Ranks, nvme: Path) -> None:
    case = {"steps": 3, "stage": 3, "accumulation": 2}
    memory = ranks(2).run(train, nvme, limit=LIMIT, **case)
    offloaded = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
    for (losses, left), (expected, reference) in zip(
        ranks(2).run(train, nvme, limit=LIMIT, **case, **offloaded), memory, strict=True
    ):
        assert losses == expected
        assert left.differing(reference) == []
        assert left.written > 0


def test_recomputed_activations_change_no_bit(ranks: Ranks, nvme: Path) -> None:
    """The recomputation draws the same dropout, and its all-to-alls meet on all ranks."""
    case = {"steps": 3, "kind": "gpt2", "model": {"dropout": 0.2}}
    kept = ranks(2).run(train, nvme, limit=LIMIT, **case)
    recomputed = ranks(2).run(train, nvme, limit=LIMIT, **case, checkpointing=True)
    assert kept[0][0] == kept[1][0]
    for (losses, left), (expected, reference) in zip(recomputed, kept, strict=True):
        assert losses == expected
        assert left.differing(reference) == []
    assert ranks(2).run(train, nvme, limit=LIMIT, **case | {"model": {}})[0][0] != kept[0][0], (
        "nothing was dropped"
    )


def exchanged(rank: int) -> None:
    tiering.init_distributed(verbose=False)
    group = dist.group.WORLD
    queries = torch.arange(2 * 4 * 6 * 3).view(2, 4, 6, 3).float()
    keys = -queries[:, ::2].to(torch.bfloat16)
    for tensors in ((queries, keys.float()), (queries, keys)):
        mine = [whole.chunk(2, dim=2)[rank].clone().requires_grad_() for whole in tensors]
        heads = tokens_to_heads(*mine, group=group)
        for whole, part in zip(tensors, heads, strict=True):
            assert part.dtype == whole.dtype
            assert torch.equal(part, whole.chunk(2, dim=1)[rank])
        back = heads_to_tokens(heads[0].transpose(1, 2), group=group)
        assert torch.equal(back, mine[0].transpose(1, 2))
        # The gradient of a token is that of its rank, wherever its heads were.
        scale = torch.arange(1.0, 4.0) * (rank + 1)
        (back * scale).sum().backward()
        assert torch.equal(mine[0].grad, scale.expand_as(mine[0]))
    with pytest.raises(tiering.ConfigError, match=r"\(2, 3, 3, 3\) cannot be divided among the 2 ranks"):
        tokens_to_heads(queries[:, :3, :3], group=group)


def test_tokens_become_heads_and_return(ranks: Ranks) -> None:
    ranks(2).run(exchanged, limit=LIMIT)


def refusals(rank: int) -> list[str]:
    tiering.init_distributed(verbose=False)
    model = build("llama")

    def message(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(tiering.ConfigError) as caught:
            call(*args, **kwargs)
        return caught.value.message

    messages = [message(ulysses_attention, model, ranks=3), message(ulysses_attention, model)]
    messages.append(message(ulysses_attention, model, group=dist.new_group([0, 1]), ranks=2))
    assert model.config._attn_implementation == "sdpa"
    ulysses = ulysses_attention(model, group=dist.group.WORLD)
    assert (ulysses.size, ulysses.rank, ulysses.data_size, ulysses.data_rank) == (2, rank, 1, 0)
    messages.append(message(ulysses_attention, model, ranks=2))
    messages.append(message(ulysses.shard, batch(0, data_rank=rank)))
    messages.append(message(ulysses.shard, batch(0, data_rank=0, tokens=15)))
    messages.append(message(ulysses.shard, {} if rank else batch(0, data_rank=0)))
    mine = ulysses.shard(batch(0, data_rank=0, padded="left"))
    messages.append(message(model, **mine | {"attention_mask": mine["attention_mask"][:, :8]}))
    with torch.no_grad():
        messages.append(message(model.generate, mine["input_ids"], max_new_tokens=3, do_sample=False))
        ulysses.remove()
        alone = model.generate(mine["input_ids"], max_new_tokens=3, do_sample=False)
    with pytest.raises(tiering.ConfigError, match=r"shard\(\) was called after remove\(\)"):
        ulysses.shard(batch(0, data_rank=0))
    assert torch.equal(
        alone, build("llama").generate(mine["input_ids"], max_new_tokens=3, do_sample=False)
    ), "the model has its own attention again"
    return messages


def test_what_cannot_be_divided_is_named(ranks: Ranks) -> None:
    first, second = ranks(2).run(refusals, limit=LIMIT)
    assert "the batch of rank 1 cannot be divided; see the error of that rank" in first.pop(6)
    assert "no tensor 'input_ids' or 'inputs_embeds'" in second.pop(6)
    assert first == second, "one rank would wait for the other"
    expected = [
        "3 ranks for each sequence do not divide the 2 ranks of this run",
        "needs either `ranks` (such as ranks=2) or `group`",
        "needs either `ranks` (such as ranks=2) or `group`",
        "already has Ulysses attention",
        "rank 1 has another batch (2 rows of 16 tokens) than rank 0",
        "sequences of 15 tokens cannot be cut into 2 equal parts",
        "an attention_mask of 8 tokens does not match 2 ranks with 8 tokens each",
        "call ulysses.remove() before generate",
    ]
    for message, part in zip(first, expected, strict=True):
        assert part in message
