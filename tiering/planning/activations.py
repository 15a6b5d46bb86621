"""Activations of a micro-batch: what autograd saves, what of it leaves the device, and the most that the device holds.

Pure. Backward uses first what was saved last, so what leaves the device is the oldest: the blocks, then the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tiering._text import counted
from tiering.config.fields import format_need
from tiering.config.training import TieringConfig, format_size
from tiering.errors import PlacementError
from tiering.placement.plan import Plan
from tiering.placement.tenants import activations
from tiering.placement.workload import ACTIVATIONS, Tier, Workload
from tiering.planning.setting import Setting

FP32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of one micro-batch of one rank.

    ``blocks``: what the ``count`` blocks save until their backward: their inputs, if they are checkpointed, otherwise
    everything. ``block``: what one block saves inside while backward repeats its forward. ``loss``: what head and loss
    save. ``beside_loss``: gradients of the logits, which exist together with ``loss``. With ``count`` None, ``blocks``
    is what the whole model saves, and the rest is unknown.
    """

    count: int | None
    blocks: int
    block: int
    loss: int
    beside_loss: int

    @property
    def saved(self) -> int:
        """Bytes that autograd saves in forward."""
        return self.blocks + self.loss

    def on_device(self, moved: int = 0) -> int:
        """The most that the device holds at one time, if ``moved`` bytes leave it.

        Either in the loss, while the blocks wait, or in the backward of the last block. The loss is on the device while
        it is computed, even if it leaves afterwards.
        """
        return self.blocks - min(moved, self.blocks) + max(self.block, self.loss + self.beside_loss)

    def excess(self, room: int) -> int:
        """The least that has to leave a device with ``room`` bytes for them. More than ``blocks`` cannot."""
        return max(0, self.on_device() - room)

    def __str__(self) -> str:
        if self.count is None:
            return f"{format_size(self.blocks)} that autograd saves"
        parts = {
            f"{'inputs of ' if self.block else ''}{counted(self.count, 'block')}": self.blocks,
            "the inside of one block": self.block,
            "logits and loss": self.loss + self.beside_loss,
        }
        return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in parts.items() if nbytes)


ActivationsOf = Callable[[Setting], Activations]
"""The activations of a model by the setting: its tokens, checkpointing and loss."""


def of_decoder(
    setting: Setting,
    *,
    layers: int,
    hidden: int,
    key_values: int,
    heads: int,
    intermediate: int,
    vocabulary: int,
    itemsize: int,
    trained: bool = True,
    adapted: Callable[[str], bool] = lambda module: False,
) -> Activations:
    """The activations of a decoder of the Llama family as transformers computes it, with torch's fused attention.

    Sizes are elements. ``trained``: all parameters are; otherwise only adapters on the linear layers for which
    ``adapted`` is true. A linear layer saves its input if its weight, or an adapter on it, is trained.

    A norm keeps its input in fp32, and in the compute dtype its quotient, if its weight is trained. Attention keeps
    queries, keys, values and its result; the MLP keeps both projections, the result of SiLU, and the product. The loss
    keeps log-probabilities in fp32, and its backward makes two gradients of that size.
    """
    saves_input = {
        name: trained or adapted(name) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    into_attention = any(saves_input[name] for name in ("q_proj", "k_proj", "v_proj"))
    into_mlp = saves_input["gate_proj"] or saves_input["up_proj"]
    norm = FP32 * (hidden + 1) + itemsize * hidden * trained
    attention = itemsize * (hidden * (2 + into_attention) + 2 * key_values) + FP32 * heads
    # SiLU keeps its input, and the product keeps its two factors.
    mlp = itemsize * (hidden * into_mlp + intermediate * (3 + (trained or adapted("down_proj"))))
    block = setting.tokens * (2 * norm + attention + mlp)
    last_norm = norm + itemsize * hidden * trained
    logits = FP32 * vocabulary
    if setting.loss_chunk:
        # Of a chunk its logits, three times in fp32; gradients of the input, and of the head twice, once in fp32.
        kept, head = 0, vocabulary * hidden * (FP32 + itemsize) * trained
        made = min(setting.tokens, setting.loss_chunk) * (itemsize * vocabulary + 3 * logits)
        made += setting.tokens * itemsize * hidden + head
    else:
        kept, made = logits, setting.tokens * 2 * logits
    return Activations(
        layers,
        blocks=layers * setting.tokens * itemsize * hidden if setting.checkpointed else layers * block,
        block=block // setting.tokens * setting.tokens_of_block if setting.checkpointed else 0,
        loss=setting.tokens * (last_norm + kept),
        beside_loss=made,
    )


@dataclass(frozen=True)
class PlacedActivations:
    """Where the activations of a micro-batch are: ``moved`` bytes leave the device, of which ``swapped`` go to NVMe.

    ``room``: bytes of a GPU that the plan does not use; None if the CPU is the device.
    """

    sizes: Activations
    place: str
    room: int | None
    moved: int = 0
    swapped: int = 0

    @property
    def on_device(self) -> int:
        """The most that the device holds at one time."""
        return self.sizes.on_device(self.moved)

    @property
    def fits(self) -> bool:
        """Whether a GPU has room for what stays on it."""
        return self.room is None or self.on_device <= self.room

    def check(self, setting: Setting) -> None:
        """Raise PlacementError if a GPU has no room for what stays on it."""
        if self.fits:
            return
        assert self.room is not None
        tokens = "" if self.sizes.count is None else f" of {setting.tokens:,} tokens"
        moved = f"; {format_size(self.moved)} of them leave it" if self.moved else ""
        raise PlacementError(
            f"the GPU needs {format_need(self.on_device)} for activations of a micro-batch{tokens}"
            f" ({self.sizes}{moved}), but the plan leaves {format_size(max(0, self.room))} of it; use micro-batches of"
            " fewer tokens"
        )

    def as_dict(self) -> dict[str, int | str | None]:
        """Bytes as a JSON value."""
        return {
            "place": self.place,
            "blocks": self.sizes.blocks,
            "block": self.sizes.block,
            "loss": self.sizes.loss,
            "beside_loss": self.sizes.beside_loss,
            "on_device": self.on_device,
            "room": self.room,
            "moved": self.moved,
            "swapped": self.swapped,
        }

    def __str__(self) -> str:
        """A sentence for the report."""
        of = "" if self.room is None else f" of the {format_size(self.room)} that the plan leaves"
        where = "on the device" if self.room is None else "on the GPU"
        to = "host memory" if not self.swapped else f"host memory and NVMe ({format_size(self.swapped)})"
        moved = f" {format_size(self.moved)} of them move to {to}." if self.moved else ""
        return (
            f"Activations of a micro-batch: {format_size(self.on_device)} {where}{of}: {self.sizes}.{moved}"
        )


def beside_budget(load: Workload, config: TieringConfig, sizes: Activations) -> int:
    """Bytes of a GPU that a micro-batch of ``load`` needs beside the engine's.

    They are the activations ``sizes`` as far as ``config`` cannot move them, and gradients on their way to the engine.
    """
    moved = sizes.blocks if config.tiering.activations == "auto" else sizes.saved
    return sizes.on_device(_movable(config, moved)[0]) + load.gradients_beside


def _movable(config: TieringConfig, nbytes: int) -> tuple[int, int]:
    """How many of ``nbytes`` of activations leave the device, and how many of these go to NVMe."""
    tiering = config.tiering
    if tiering.activations == "device":
        return 0, 0
    if tiering.activations == "host" or not config.zero.swap_directories:
        return min(nbytes, tiering.activation_budget), 0
    # Half of their memory is for what is written and read ahead.
    return nbytes, max(0, nbytes - tiering.activation_budget // 2)


def with_activations(
    load: Workload, plan: Plan, config: TieringConfig, setting: Setting, sizes: Activations
) -> tuple[Workload, PlacedActivations]:
    """``load`` with what ``config`` moves of the activations ``sizes``, and where they are beside ``plan``, its plan.

    The caller checks whether a GPU has room for what stays there.
    """
    tiering, used = config.tiering, plan.total(Tier.DEVICE)
    # Gradients on their way to the engine are on the GPU, too.
    room = None if setting.gpu_memory is None else setting.gpu_memory - used - load.gradients_beside
    excess = sizes.excess(plan.budgets.device - used if room is None else room)
    moved = min(excess, sizes.blocks) if tiering.activations == "auto" else sizes.saved
    moved, swapped = _movable(config, moved)
    tenant = activations(
        config, copied=moved * load.micro_batches, swapped=swapped, passes=load.micro_batches
    )
    others = tuple(each for each in load.others if each.kind != ACTIVATIONS)
    placed = PlacedActivations(sizes, tiering.activations, room, moved, swapped)
    return replace(load, others=(*others, *tenant)), placed
