"""Cutting a batch: the parts together are the batch, and the losses of the parts that of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tiering.errors import ConfigError
from tiering.sequence.batch import fingerprint, shard, token_loss


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (rows, tokens), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, tokens, generator=generator) < 0.4, -100)
    return {"input_ids": ids, "labels": labels}


@given(rows=st.integers(1, 3), tokens=st.integers(2, 20), ranks=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_the_mean_of_the_losses_of_all_parts_is_the_loss_of_the_whole(
    rows: int, tokens: int, ranks: int, seed: int
) -> None:
    whole = batch(rows, tokens, seed)
    logits = torch.randn(rows, tokens, 50, generator=torch.Generator().manual_seed(seed)).double()
    parts = [shard(whole, ranks, rank, pad=0) for rank in range(ranks)]
    padded = functional.pad(logits, (0, 0, 0, -tokens % ranks)).chunk(ranks, dim=1)
    losses = [
        token_loss(part, mine["shift_labels"], mine["num_items_in_batch"])
        for part, mine in zip(padded, parts, strict=True)
    ]
    targets = whole["labels"][:, 1:]
    expected = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten())
    if bool((targets == -100).all()):
        expected = torch.tensor(0.0)
    assert float(sum(losses)) / ranks == pytest.approx(float(expected), rel=1e-5)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1)[:, :tokens], whole["input_ids"])
    positions = torch.cat([part["position_ids"] for part in parts], 1)
    assert positions.tolist() == [list(range(tokens + -tokens % ranks))]


def test_the_first_label_of_a_part_is_the_target_of_the_part_before() -> None:
    ids = torch.arange(8)[None]
    first, second = (shard({"input_ids": ids, "labels": ids}, 2, rank) for rank in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100]]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 3.5


def test_masks_stay_whole_and_other_values_as_they_are() -> None:
    mask = torch.ones(1, 5)
    inputs = {"inputs_embeds": torch.randn(1, 5, 3), "attention_mask": mask, "use_cache": False}
    mine = shard(inputs | {"position_ids": torch.arange(5)[None] + 7}, 2, 1, pad=9)
    assert mine["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert mine["position_ids"].tolist() == [[10, 11, 12]]
    assert torch.equal(mine["inputs_embeds"][:, :2], inputs["inputs_embeds"][:, 3:])
    assert not mine["inputs_embeds"][:, 2].any()
    assert mine["use_cache"] is False
    assert "num_items_in_batch" not in mine


IDS = torch.arange(8).view(1, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no inputs": ({"labels": IDS}, "no tensor 'input_ids' or 'inputs_embeds'"),
    "other tensors": (
        {"input_ids": IDS, "pixel_values": IDS},
        "has 'pixel_values', a tensor that cannot be cut",
    ),
    "a length": ({"input_ids": IDS[:, :7]}, "sequences of 7 tokens cannot be cut into 2 equal parts"),
    "packed": ({"input_ids": IDS, "position_ids": IDS % 4}, "several documents are packed into one sequence"),
    "labels": (
        {"input_ids": IDS, "labels": IDS[:, 1:]},
        "'labels' of 7 tokens do not match inputs of 8 tokens",
    ),
    "positions": (
        {"input_ids": IDS, "position_ids": IDS[:, :4]},
        "position_ids of 4 tokens do not match inputs of 8 tokens",
    ),
    "labels of rows": (
        {"input_ids": IDS, "labels": IDS[:, 0]},
        r"has 'labels' of shape \(1,\); pass a tensor",
    ),
    "a list": ({"input_ids": IDS, "attention_mask": [1] * 8}, "has 'attention_mask' of list; pass a tensor"),
    "a mask": ({"input_ids": IDS, "attention_mask": IDS[:, 1:]}, "attention_mask of 7 tokens does not match"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_named(case: str) -> None:
    inputs, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        shard(inputs, 2, 0)


def test_a_mask_for_pairs_of_tokens_is_not_padded() -> None:
    inputs = {"input_ids": IDS[:, :7], "attention_mask": torch.ones(1, 1, 7, 7)}
    with pytest.raises(ConfigError, match="of 4 dimensions cannot be padded"):
        shard(inputs, 2, 0, pad=0)


def test_fingerprints_differ_where_batches_do() -> None:
    whole = batch(2, 6)
    assert fingerprint(whole, 0) == fingerprint({key: value.clone() for key, value in whole.items()}, 0)
    other_label = whole | {"labels": whole["labels"].clone()}
    other_label["labels"][1, 5] = 49
    masked = whole | {"attention_mask": torch.ones_like(whole["input_ids"])}
    others = [batch(2, 6, seed=1), other_label, masked, {"input_ids": whole["input_ids"].view(3, 4)}]
    assert (
        len({tuple(fingerprint(each, 0)) for each in [whole, *others]} | {tuple(fingerprint(whole, 1))}) == 6
    )
