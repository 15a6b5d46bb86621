"""The parts of one rank's engine, as ``zero3.setup`` makes them and the rooms above ``building`` take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tiering.placement.plan import Plan
from zero3.building.fill import Fill
from zero3.building.model_names import ModelNames
from zero3.device.tiers import Tiers
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.optimizer.tiles import StateLayout, Tile
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.passes.gradients import GradientStore
from zero3.passes.reduction import GradientReducer
from zero3.ranks.collectives import Collectives
from zero3.ranks.joining import World


@dataclass(frozen=True)
class Assembly:
    """The parts of one rank's engine. ``tiers`` and ``collectives`` own what has to be closed.

    ``sink`` takes gradients from autograd: ``gradients`` itself, or what reduces them over ranks first. ``replicas``
    are the parameters that every rank keeps whole though each steps a shard. ``fill`` has filled the tiers. ``frozen``
    are the parameters that required a gradient before, and were frozen because nothing trains them. ``names`` are those
    of checkpoints.
    """

    world: World
    device: torch.device
    plan: Plan
    tiers: Tiers
    groups: list[ParamGroup]
    tiles: list[Tile]
    layout: StateLayout
    gradients: GradientStore
    optimizer: TieredOptimizer | ClientOptimizer
    sink: GradientStore | GradientReducer
    collectives: Collectives | None
    replicas: Replicas | None
    fill: Fill
    frozen: list[nn.Parameter]
    names: ModelNames
