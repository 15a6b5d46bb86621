"""Activations in the plan: counted as autograd saves them, refused with changes that help, moved and timed."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier, Workload
from tiering.planning.activations import Activations, PlacedActivations, with_activations
from tiering.planning.adapters import Adapters
from tiering.planning.decoder import Decoder
from tiering.planning.forecast import MachinePart, forecast
from tiering.planning.profiles import PROFILES
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import load_of

from .asking import Plan, answered

GIB = 1 << 30
BIG = ["--params=70B", "--profile=rtx4090", "--micro-batches=1", "--tokens=65536", "--checkpointing"]
LONG = ["--params=7B", "--profile=rtx4090", "--micro-batches=1", "--tokens=65536", "--checkpointing"]
SHAPE = Decoder(512, 3, 1408, 1000, key_values=256)
BUDGETS = Budgets(1 << 30, 4 << 30, 64 << 30)


def saved_by(model: Any, tokens: int, vocabulary: int) -> int:
    """Bytes that autograd saves in a forward of one sequence: storages, without those of the model."""
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    ids = torch.randint(0, vocabulary, (1, tokens))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    saved = sum(storage.nbytes() for storage in storages.values())
    del loss
    return saved


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_formula_is_what_autograd_saves(dtype: torch.dtype, checkpointed: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        vocab_size=SHAPE.vocabulary,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(dtype).train()
    if checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    setting = Setting(tokens=256, checkpointed=checkpointed)
    sizes = SHAPE.activations(setting, itemsize=dtype.itemsize)
    # Sines and cosines of positions, tokens and labels are left out: less than a hundredth.
    assert sizes.saved == pytest.approx(saved_by(model, 256, SHAPE.vocabulary), rel=0.01)
    whole = SHAPE.activations(replace(setting, checkpointed=False), itemsize=dtype.itemsize)
    assert sizes.block == (whole.blocks // SHAPE.layers if checkpointed else 0)


@pytest.mark.parametrize(
    ("modules", "fewer", "product"),
    [
        (None, 4 * SHAPE.hidden, 0),
        (("q_proj", "v_proj"), 6 * SHAPE.hidden, 2 * SHAPE.intermediate),
        (("down_proj",), 8 * SHAPE.hidden, 0),
    ],
)
def test_frozen_layers_save_less(modules: tuple[str, ...] | None, fewer: int, product: int) -> None:
    """Quotients of the two norms; without adapters on their layers also the inputs and the product of the MLP."""
    setting = Setting(tokens=100)
    trained, frozen = (
        SHAPE.activations(setting, itemsize=2, adapters=adapters) for adapters in (None, Adapters(8, modules))
    )
    assert trained.blocks - frozen.blocks == 100 * SHAPE.layers * (fewer + product)
    # The last norm, and the input of the frozen head.
    assert trained.loss - frozen.loss == 100 * 2 * 2 * SHAPE.hidden


@pytest.mark.parametrize(("tokens", "rows"), [(2000, 1024), (100, 100)])
@pytest.mark.parametrize("adapters", [None, Adapters(8, None)])
def test_the_loss_in_chunks_makes_the_logits_of_one(
    tokens: int, rows: int, adapters: Adapters | None
) -> None:
    whole, chunked = (
        SHAPE.activations(Setting(tokens=tokens, loss_chunk=chunk), itemsize=2, adapters=adapters)
        for chunk in (0, 1024)
    )
    logits = SHAPE.vocabulary * rows * (2 + 3 * 4)
    # A trained head has a gradient in bf16, and the sum of those of the chunks in fp32.
    head = 0 if adapters else SHAPE.vocabulary * SHAPE.hidden * (2 + 4)
    assert chunked.beside_loss == logits + 2 * tokens * SHAPE.hidden + head
    assert whole.beside_loss == 2 * 4 * tokens * SHAPE.vocabulary
    assert whole.loss - chunked.loss == 4 * tokens * SHAPE.vocabulary


def test_a_large_model_with_a_long_micro_batch_is_refused(plan: Plan) -> None:
    code, out, _ = plan(*BIG)
    assert code == 1
    text = " ".join(out.split())
    # 71 blocks of 65,536 tokens of 9,216 elements in bf16.
    assert "Does not fit. [TIER-PLAN] the GPU needs 107.82 GiB for activations" in text
    assert (
        "inputs of 71 blocks 79.88 GiB, the inside of one block 25.52 GiB, logits and loss 27.94 GiB" in text
    )
    assert "tokens in a micro-batch (--tokens " in text


def test_every_change_that_is_offered_helps(plan: Plan) -> None:
    told = answered(plan, *LONG)
    assert not told["fits"] and told["refusal"].startswith("[TIER-PLAN] the GPU needs")
    options = {
        "tiering.activations": lambda value: [f"--activations={value}"],
        "checkpointing": lambda value: ["--checkpointing"],
        "loss_chunk": lambda value: ["--chunked-loss"],
        "tokens": lambda value: [f"--tokens={value}"],
    }
    offers = {tuple(offer["change"]): offer for offer in told["remedies"]}
    assert list(offers) == [("tiering.activations", "loss_chunk"), ("tokens",)]
    for offer in offers.values():
        changed = [text for key, value in offer["change"].items() for text in options[key](value)]
        assert plan(*LONG, *changed)[0] == 0
    assert "--chunked-loss" in offers["tiering.activations", "loss_chunk"]["text"]
    tokens = offers[("tokens",)]["change"]["tokens"]
    assert f"at most {tokens} tokens in a micro-batch (--tokens {tokens})" in offers[("tokens",)]["text"]
    assert plan(*LONG, f"--tokens={tokens + 256}", "--tile=0")[0] == 1


def test_what_is_in_use_is_not_offered(plan: Plan) -> None:
    asked = [*LONG, "--tokens=8192"]
    assert plan(*asked)[0] == 0
    without = [option for option in asked if option != "--checkpointing"]
    alone = [offer["change"] for offer in answered(plan, *without)["remedies"]]
    assert {"checkpointing": True} in alone and {"tiering.activations": "auto"} in alone
    moved = [offer["change"] for offer in answered(plan, *LONG, "--activations=nvme")["remedies"]]
    assert moved and not any("tiering.activations" in change for change in moved)
    # NVMe has room for what host memory has not.
    limited = [offer["change"] for offer in answered(plan, *LONG, "--activations=host")["remedies"]]
    assert {"tiering.activations": "auto", "loss_chunk": 1024} in limited
    in_use = [*LONG, "--activations=auto", "--chunked-loss", "--tokens=262144"]
    assert [set(offer["change"]) for offer in answered(plan, *in_use)["remedies"]] == [{"tokens"}]


def test_no_more_changes_than_needed_are_offered_and_fewer_tokens_by_whole_sequences(plan: Plan) -> None:
    asked = ["--params=7B", "--profile=rtx4090", "--micro-batches=1", "--tokens=8000", "--sequence=1000"]
    changes = [offer["change"] for offer in answered(plan, *asked)["remedies"]]
    assert changes == [{"tiering.activations": "auto"}, {"checkpointing": True}, {"tokens": 3000}]
    changes = [offer["change"] for offer in answered(plan, *BIG)["remedies"]]
    fewer = [change for change in changes if "tokens" in change]
    assert [set(change) - {"tokens"} for change in fewer] == [set(), {"tiering.activations", "loss_chunk"}]
    assert fewer[0]["tokens"] < fewer[1]["tokens"]


def test_fewer_tokens_are_offered_where_host_memory_has_no_room_for_activations(plan: Plan) -> None:
    asked = ["--model=llama-3-8b", "--lora=16", "--base=nf4", "--tokens=65536", "--gpu=8GiB"]
    asked += ["--sequence=2048", "--device-budget=1100MiB", "--nvme-budget=120GiB"]
    for host, moved in (("3GiB", False), ("4GiB", True)):
        (offer,) = answered(plan, *asked, f"--host-budget={host}")["remedies"]
        others = {"checkpointing", "loss_chunk"} | ({"tiering.activations"} if moved else set())
        assert set(offer["change"]) == {"tokens", *others}
        changed = [f"--tokens={offer['change']['tokens']}", "--checkpointing", "--chunked-loss"]
        changed += ["--activations=auto"] * moved
        assert plan(*asked, f"--host-budget={host}", *changed)[0] == 0


def test_a_micro_batch_has_at_least_one_sequence(plan: Plan) -> None:
    """A remedy with fewer tokens makes a sequence shorter that would not fit into it."""
    assert answered(plan, *LONG[:3], "--sequence=8192")["micro_batch_tokens"] == 8192
    _, _, message = plan(*LONG[:3], "--sequence=8192", "--tokens=4096")
    assert "a micro-batch of 4,096 tokens has no sequence of 8,192; give more tokens" in message
    told = answered(plan, *LONG, "--sequence=65536")
    (offer,) = (offer for offer in told["remedies"] if "tokens" in offer["change"])
    tokens = offer["change"]["tokens"]
    assert offer["change"] == {"tokens": tokens, "sequence": tokens}
    assert offer["text"].endswith(f"sequences of at most {tokens} (--sequence {tokens})")
    assert plan(*LONG, f"--tokens={tokens}", f"--sequence={tokens}")[0] == 0


def test_host_memory_that_is_too_small_for_activations_is_offered_more(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"train_batch_size": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},'
                      ' "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},'
                      ' "offload_optimizer": {"device": "cpu"}}}')  # fmt: skip
    asked = ["--params=1.5B", f"--config={config}", "--gpu=8GiB", "--host-budget=64GiB", "--checkpointing"]
    asked += ["--tokens=65536", "--chunked-loss"]
    assert plan(*asked)[0] == 1
    (change,) = (
        each["change"]
        for each in answered(plan, *asked)["remedies"]
        if "tiering.activations" in each["change"]
    )
    budget = change["tiering.activation_budget"]
    told = answered(plan, *asked, "--activations=auto")
    assert not told["fits"] and {"tiering.activation_budget": budget} in [
        offer["change"] for offer in told["remedies"]
    ]
    assert plan(*asked, "--activations=auto", f"--activation-budget={budget}")[0] == 0


def test_swap_space_that_is_too_small_for_activations_is_offered_more(plan: Plan) -> None:
    """Whether there is room for the state, as with 60 GiB, or not."""
    needed = []
    for budget in ("60GiB", "16GiB"):
        asked = [*LONG, "--chunked-loss", "--activations=nvme"]
        told = answered(plan, *asked, f"--nvme-budget={budget}")
        assert not told["fits"] and "raise nvme_budget" in told["refusal"]
        needed += [
            offer["change"]["tiering.nvme_budget"]
            for offer in told["remedies"]
            if list(offer["change"]) == ["tiering.nvme_budget"]
        ]
        assert plan(*asked, f"--nvme-budget={needed[-1]}")[0] == 0
    assert len(needed) == 2 and abs(needed[0] - needed[1]) < GIB // 10


def test_joined_changes_name_the_budgets_of_both_for_each_rank(plan: Plan) -> None:
    asked = [*LONG, "--chunked-loss", "--activations=nvme", "--nvme-budget=4GiB", "--host-budget=40GiB"]
    _, out, _ = plan(*asked, "--ranks=2")
    joined = next(line for line in " ".join(out.split()).split(" - ") if "host_budget" in line)
    assert "nvme_budget" in joined
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", joined)]
    assert len(sizes) == 4 and sizes[::2] == pytest.approx([2 * size for size in sizes[1::2]], abs=0.02)


def test_activations_that_move_are_in_the_budgets_and_in_the_time_of_a_step(plan: Plan) -> None:
    asked = [*LONG, "--tokens=40960", "--micro-batches=4"]
    assert plan(*asked)[0] == 1
    told = answered(plan, *asked, "--activations=nvme")
    # Inputs of 32 blocks, and what head and loss save.
    blocks = 32 * 40960 * 4096 * 2
    assert told["activations"]["blocks"] == blocks
    assert told["activations"]["moved"] == blocks + told["activations"]["loss"]
    assert told["activations"]["swapped"] == told["activations"]["moved"] - GIB // 2
    assert told["plan"]["tiers"]["host"]["contents"]["activations"] == GIB
    on_nvme = told["plan"]["tiers"]["nvme"]["contents"]["activations"]
    assert told["activations"]["swapped"] <= on_nvme < told["activations"]["swapped"] + 4096
    least = answered(plan, *asked, "--activations=auto")
    assert least["activations"]["on_device"] == least["activations"]["room"]
    assert 0 < least["activations"]["moved"] < told["activations"]["moved"]
    for key in ("nvme_read", "nvme_written"):
        per_pass = told["activations"]["swapped"] - least["activations"]["swapped"]
        # Swap space for the state has less room where more of the activations are.
        assert told["plan"][key] - least["plan"][key] == 4 * per_pass
    assert told["not_counted"] == least["not_counted"] == []


def test_auto_moves_nothing_where_all_fits(plan: Plan) -> None:
    told = answered(plan, *LONG, "--tokens=4096", "--activations=auto")
    assert told["fits"] and told["activations"]["moved"] == told["activations"]["swapped"] == 0


def test_without_a_gpu_nothing_is_refused(plan: Plan) -> None:
    """The memory beside the budgets is not known."""
    asked = ["--params=60M", "--device-budget=100MiB", "--host-budget=300MiB", "--nvme-budget=2GiB"]
    told = answered(plan, *asked, "--tokens=1048576")
    assert told["fits"] and told["activations"]["room"] is None
    assert told["activations"]["on_device"] > GIB


def placed(
    place_: str, tokens: int, gpu: int | None, micro_batches: int = 1, **settings: Any
) -> tuple[Workload, PlacedActivations]:
    setting = Setting(gpu_memory=gpu, tokens=tokens, **settings)
    tiers = {"activations": place_, "activation_budget": 64 << 20}
    config = with_changes(usual_config(Path()), micro_batches=micro_batches, tiers=tiers)
    load = load_of(SHAPE, config, setting)
    sizes = SHAPE.activations(setting, itemsize=2)
    return with_activations(load, place(load, BUDGETS), config, setting, sizes)


@given(
    st.sampled_from(["device", "host", "nvme", "auto"]),
    st.integers(1, 200_000),
    st.integers(1 << 27, 1 << 33),
    st.booleans(),
    st.sampled_from([0, 1024]),
)
def test_what_moves_is_enough_or_refused(
    place_: str, tokens: int, gpu: int, checkpointed: bool, chunk: int
) -> None:
    load, found = placed(place_, tokens, gpu, checkpointed=checkpointed, loss_chunk=chunk)
    sizes, setting = found.sizes, Setting(gpu_memory=gpu, tokens=tokens)
    planned = place(load, BUDGETS)
    assert found.room == gpu - planned.total(Tier.DEVICE) - load.gradients_beside
    assert 0 <= found.swapped <= found.moved <= sizes.saved
    if place_ == "auto":
        fewer = sizes.on_device(found.moved - 1) if found.moved else 0
        assert not found.moved or fewer > found.room or found.on_device > found.room
    if place_ == "device":
        assert found.moved == 0
    if place_ == "host":
        assert (found.moved, found.swapped) == (min(sizes.saved, 64 << 20), 0)
    if place_ == "nvme":
        assert (found.moved, found.swapped) == (sizes.saved, max(0, sizes.saved - (32 << 20)))
    if found.on_device > found.room:
        # Nothing that can leave is left.
        assert place_ != "auto" or found.moved == sizes.blocks
        with pytest.raises(PlacementError, match="use micro-batches of fewer tokens"):
            found.check(setting)
    else:
        found.check(setting)
    read, written = planned.nvme_traffic_by_kind()
    assert read["activations"] == written["activations"] == found.swapped * load.micro_batches


def test_on_a_cpu_the_device_budget_has_room_for_what_stays() -> None:
    load, found = placed("auto", 20_000, None)
    room = BUDGETS.device - place(replace(load, others=()), BUDGETS).total(Tier.DEVICE)
    assert found.room is None
    assert 0 < found.moved == found.sizes.on_device() - room < found.sizes.blocks


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_copies_take_the_link_and_the_drives(micro_batches: int) -> None:
    load, found = placed("nvme", 50_000, 4 << 30, micro_batches, checkpointed=True)
    usual = with_changes(usual_config(Path()), micro_batches=micro_batches, tiers={})
    still = load_of(SHAPE, usual, Setting(gpu_memory=4 << 30))
    profile = PROFILES["rtx4090"]
    rates = replace(profile.rates(load), flops=1e30, device_memory=1e30)
    moving, staying = (
        forecast(place(each, BUDGETS), rates, tokens=50_000, checkpointed=True) for each in (load, still)
    )
    for phase, (drive, rate) in enumerate(
        ((MachinePart.NVME_WRITES, rates.nvme_write), (MachinePart.NVME_READS, rates.nvme_read))
    ):
        link = moving.phases[phase].busy[MachinePart.DEVICE_LINK]
        assert link > staying.phases[phase].busy[MachinePart.DEVICE_LINK] or phase == 0
        more = moving.phases[phase].busy[drive] - staying.phases[phase].busy[drive]
        assert rate is not None and more == pytest.approx(micro_batches * found.swapped / rate)
    assert rates.device_link is not None
    forward = moving.phases[0].busy[MachinePart.DEVICE_LINK]
    assert forward == pytest.approx(micro_batches * found.moved / rates.device_link)


def test_the_most_on_the_device_is_in_the_loss_or_in_a_block() -> None:
    sizes = Activations(count=4, blocks=400, block=90, loss=20, beside_loss=40)
    assert sizes.on_device() == 400 + 90
    assert replace(sizes, block=0).on_device() == 400 + 60
    assert sizes.on_device(150) == 250 + 90
    assert sizes.on_device(10_000) == 90
    assert [sizes.excess(room) for room in (490, 489, 300, 10)] == [0, 1, 190, 480]


def test_chunks_of_rows_take_the_memory_of_one_and_the_traffic_of_one_micro_batch(plan: Plan) -> None:
    """The tokens of 16 micro-batches, of which a block computes one or two sequences at a time."""
    model = ["--params=70B", "--profile=rtx4090"]
    large = ["--tokens=65536", "--sequence=4096", "--micro-batches=1", "--chunked-loss", "--activations=nvme"]
    whole = answered(plan, *model, *large, "--checkpointing")
    assert not whole["fits"] and "the inside of one block 25.52 GiB" in whole["refusal"]
    one, two = (answered(plan, *model, *large, f"--block-rows={rows}") for rows in (1, 2))
    several = answered(plan, *model, "--tokens=4096", "--micro-batches=16", "--checkpointing")
    inside = several["activations"]["block"]
    assert (one["activations"]["block"], two["activations"]["block"]) == (inside, 2 * inside)
    # Of the sequences of a micro-batch, a block computes as many as the configuration says.
    assert two["configuration"]["train_micro_batch_size_per_gpu"] == 16
    assert two["configuration"]["tiering"]["block_rows"] == 2
    assert one["activations"]["blocks"] == 16 * several["activations"]["blocks"]
    for direction in ("nvme_read", "nvme_written"):
        assert one["plan"][direction] == two["plan"][direction] < several["plan"][direction] / 3
    assert one["forecast"]["tokens_per_second"] > 2 * several["forecast"]["tokens_per_second"]
    # Each chunk's gradients leave the GPU.
    links = [answer["forecast"]["phases"][1]["busy"]["device link"] for answer in (one, two)]
    assert links[1] < links[0]


def test_chunks_of_rows_need_the_length_of_a_row(plan: Plan, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "tiering": {"block_rows": 2}}')
    for rows in ("--block-rows=2", f"--config={config}"):
        code, _, error = plan("--params=7B", "--profile=rtx4090", rows)
        assert code == 2 and "block_rows counts sequences: give their length by --sequence N" in error
