"""The pass schedule: which groups are unsharded when, and when their gradients are complete.

Note [When is a group done in backward]
    Counting gradients does not tell: unused experts get none, a frozen group gets none, under reentrant checkpointing
    a parameter gets several. The order tells: autograd runs nodes in the reverse of their creation, so when a gradient
    first reaches another group's output, every group that does not enclose that one has no node left to run. What is
    still live when backward ends is done then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from tiering.errors import EngineStateError
from zero3.grads import GradientStore
from zero3.hooks import call_at_end_of_backward, in_backward_pass
from zero3.param_group import ParamGroup
from zero3.partition import Piece
from zero3.prefetch import Prefetcher
from zero3.saved_tensors import SavedTensors


class PassSchedule:
    """Listens to the hooks of ``groups`` (see hooks.Events) and moves groups and gradients accordingly."""

    def __init__(
        self,
        groups: list[ParamGroup],
        prefetcher: Prefetcher,
        gradients: GradientStore,
        on_backward: Callable[[], None],
        on_end_of_backward: Callable[[], None],
    ) -> None:
        self._prefetcher = prefetcher
        self._gradients = gradients
        self._on_backward = on_backward
        self._on_end_of_backward = on_end_of_backward
        self._enclosing = {group: _enclosing(group, groups) for group in groups}
        self._calls: Counter[ParamGroup] = Counter()  # forwards of entries that are running now
        self._live: list[ParamGroup] = []  # held for backward
        self._saved = SavedTensors(groups, self.need)
        self.in_backward = False

    def begin_forward(self, training: bool) -> None:
        """The whole model is about to be called."""
        if self.in_backward and not in_backward_pass():
            # A backward that nobody guarded (the user's loss.backward()) ended by an exception: start clean.
            self.abandon()
            self._gradients.reset()
        self._prefetcher.begin_pass(training)

    def pre_forward(self, group: ParamGroup) -> None:
        self._calls[group] += 1
        self._saved.enter()
        if self._calls[group] == 1 and group not in self._live:
            if self.in_backward:  # recomputed under checkpointing
                self._finish_unrelated(group)
            self._prefetcher.acquire(group)

    def post_forward(self, group: ParamGroup) -> None:
        self._calls[group] -= 1
        self._saved.leave()
        if self._calls[group] == 0 and group not in self._live:
            self._prefetcher.release(group)

    def begin_backward(self) -> None:
        """A gradient has reached an output of the model or of a group. Further calls in the same pass do nothing."""
        if not self.in_backward:
            if torch.is_grad_enabled() and self._saved.owners:
                raise EngineStateError(
                    "backward was called with create_graph=True: gradients of gradients are not supported in this"
                    " version while parameters are offloaded; use offload_param: none"
                )
            self.in_backward = True
            call_at_end_of_backward(self.end_of_backward)
            self._on_backward()

    def pre_backward(self, group: ParamGroup) -> None:
        self.begin_backward()
        for other in [g for g in self._live if g is not group and g not in self._enclosing[group]]:
            self._finish(other)
        if group not in self._live:
            self._live.append(group)
            if self._calls[group] == 0:
                self._prefetcher.acquire(group)

    def need(self, group: ParamGroup) -> None:
        """Backward is about to use a saved tensor of ``group``. See Note [Backward enters a group from anywhere]."""
        if group in self._live or self._calls[group] > 0:
            return
        if not in_backward_pass():
            raise EngineStateError(
                f"a tensor that autograd saved from group {group.name!r} was asked for outside of backward, where the"
                " group is not unsharded; read it inside of the module's forward"
            )
        self.begin_backward()
        self._finish_unrelated(group)
        self._live.append(group)
        self._prefetcher.acquire(group)

    def gradient(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        self._gradients.accumulate(group, piece, param)

    def end_of_backward(self) -> None:
        """Every gradient of this pass has arrived."""
        if not self.in_backward:
            return
        for group in list(self._live):
            self._finish(group)
        self._gradients.close_all()
        self._saved.end_of_backward()
        self.in_backward = False
        self._prefetcher.end_pass()
        self._on_end_of_backward()

    def abandon(self) -> None:
        """A pass ended by an exception: free what it held, so that the next one starts clean."""
        for group in {*self._live, *self._calls}:
            group.reshard()
        self._live.clear()
        self._calls.clear()
        self._saved.leave_all()
        self._saved.end_of_backward()
        self.in_backward = False
        self._prefetcher.forget()

    def _finish_unrelated(self, group: ParamGroup) -> None:
        """Finish the live groups that neither enclose ``group`` nor lie inside of it."""
        around = self._enclosing[group] | self._saved.in_use()
        for other in [g for g in self._live if g not in around and group not in self._enclosing[g]]:
            self._finish(other)

    def _finish(self, group: ParamGroup) -> None:
        self._live.remove(group)
        self._gradients.close(group)
        if self._calls[group] == 0:
            self._prefetcher.release(group)


def _enclosing(group: ParamGroup, groups: list[ParamGroup]) -> frozenset[ParamGroup]:
    """The groups around ``group``, innermost first to the root."""
    around = set()
    while group.parent is not None:
        group = groups[group.parent]
        around.add(group)
    return frozenset(around)
