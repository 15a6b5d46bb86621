"""The parts of one rank's engine, which ``zero3.setup`` makes and the packages above ``building`` use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tiering.placement.plan import Plan
from zero3.building.fill import Fill
from zero3.building.model_names import ModelNames
from zero3.building.wrapped_parameters import WrappedParameters
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
    """The parts of one rank's engine. ``tiers`` and ``collectives`` must be closed.

    ``sink`` takes gradients from autograd: ``gradients`` itself, or a reducer that passes their mean over the ranks to
    ``gradients``. ``replicas`` are the parameters that every rank keeps whole though it steps a shard. ``fill`` has
    filled the tiers; if the engine ``resumes``, all but what a checkpoint has to fill first. ``frozen`` are parameters
    that required a gradient before and were frozen, because nothing trains them. ``wrapped`` parameters must be joined
    when the model's are ordinary again. ``names`` are the names that checkpoints use.
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
    resumes: bool
    frozen: list[nn.Parameter]
    wrapped: WrappedParameters
    names: ModelNames
