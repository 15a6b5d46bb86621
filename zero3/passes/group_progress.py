"""Counters of one pass: how far it is with each group, and which modules run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero3.params.param_group import ParamGroup
from zero3.passes.hooks import next_node


@dataclass(slots=True)
class GroupProgress:
    """How far the pass is with one group.

    ``running`` and ``called`` live until an exception ends a pass. The counters below them restart with each pass.
    """

    enclosing: frozenset[ParamGroup]  # groups around this one
    expected: int  # trained parameters of the group: the gradients that complete it
    running: int = 0  # forwards that use the group now
    called: bool = False  # whether a forward used the group since an exception last ended a pass
    forwards: int = 0
    graphs: int = 0  # forwards that backward can enter
    entered: int = 0  # graphs that backward has entered
    arrived: int = 0  # gradients in this backward
    gathered: bool = False  # shown by gathered() to code that autograd records

    def reset(self) -> None:
        """The pass has ended."""
        self.forwards = self.graphs = self.entered = self.arrived = 0
        self.gathered = False


class RunningForward:
    """A module that runs, and the groups that it uses without being one of their entries."""

    def __init__(self) -> None:
        self.borrowed: list[ParamGroup] = []  # read directly, until this forward ends
        self.early: list[ParamGroup] = []  # unsharded before the call that needs them
        self.first_node = next_node()
        self.with_grad = torch.is_grad_enabled()


def progress_of(groups: list[ParamGroup]) -> dict[ParamGroup, GroupProgress]:
    """The progress of each group at the beginning of the first pass."""
    return {
        group: GroupProgress(_enclosing(group, groups), sum(piece.trainable for piece in group.layout.pieces))
        for group in groups
    }


def _enclosing(group: ParamGroup, groups: list[ParamGroup]) -> frozenset[ParamGroup]:
    """The groups around ``group``, from its parent to the root."""
    enclosing = set()
    while group.parent is not None:
        group = groups[group.parent]
        enclosing.add(group)
    return frozenset(enclosing)
