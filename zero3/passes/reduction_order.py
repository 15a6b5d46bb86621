"""The order in which all ranks reduce groups.

Note [The order of reductions]
    It is the order in which rank 0 finished groups in the previous backward. If a forward has used groups in another
    order since then, groups would wait for those that finish last. So in stages 2 and 3, at the beginning of each
    backward, ranks exchange the order in which their forwards have used groups. The row is sent then and needed at the
    first reduction, so it travels during the backward of the first block. In stages 0 and 1 a group waits in the memory
    of its gradients, whatever the order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from zero3.params.param_group import ParamGroup


class ReductionOrder:
    """The order of the ``groups`` in the current backward, and ``turn``, the number of groups whose turn has passed.

    First come the groups that are ``passing``: backward leaves them. Then come those in ``stays_open``, which may get
    gradients through a whole backward. Groups that are not ``trained`` are in no order.
    """

    def __init__(self, groups: list[ParamGroup]) -> None:
        parents = {group.parent for group in groups}
        self.trained = {group for group in groups if group.layout.trainable_numel}
        self.stays_open = {group for group in self.trained if group.index in parents or not group.entries}
        self.passing = self.trained - self.stays_open
        # Whether no order follows the chains of all ranks.
        self.contradicted = False
        self.turn = 0
        self._groups = groups
        self._order = sorted(self.trained, key=lambda group: (group in self.stays_open, -group.index))
        # Of each rank: the groups that its forwards have used, backwards.
        self._chains: list[list[int]] = []
        # Groups whose gradients are final, in that order.
        self._ready: dict[ParamGroup, None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def chain_of(self, used: Iterable[ParamGroup]) -> Tensor:
        """This rank's chain of a backward whose forwards have used the groups ``used``: indices (int32), then -1."""
        row = torch.full((len(self.passing),), -1, dtype=torch.int32, device="cpu")
        chain = [group.index for group in reversed(list(used)) if group in self.passing]
        row[: len(chain)] = torch.tensor(chain, dtype=torch.int32)
        return row

    def follow(self, chains: list[list[int]]) -> None:
        """Reorder the groups by the ``chains`` of all ranks, by rank. See Note [The order of reductions]."""
        # With the same chains as before, the order that rank 0 measured in the last backward is the better one.
        if chains == self._chains:
            return
        self._chains = chains
        count = len(self.passing)
        order = [group.index for group in self._order[:count]]
        used = [tuple(index for index in chain if index >= 0) for chain in chains]
        if not all(follows(chain, order) for chain in used):
            order = merged(order, used)
            self._order[:count] = [self._groups[index] for index in order]
        self.contradicted = not all(follows(chain, order) for chain in used)

    def note_ready(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final."""
        self._ready.setdefault(group)

    def forget_ready(self) -> None:
        """The gradients are dropped."""
        self._ready.clear()

    def next_is_ready(self) -> bool:
        """Whether the gradients of the group whose turn it is are final."""
        return self.turn < len(self._order) and self._order[self.turn] in self._ready

    def next(self) -> ParamGroup:
        """The group whose turn it is. Its turn passes."""
        self.turn += 1
        return self._order[self.turn - 1]

    def is_ahead(self, group: ParamGroup) -> bool:
        """Whether the turn of ``group`` is to come."""
        return group in self._order[self.turn :]

    def has_passed(self, group: ParamGroup) -> bool:
        """Whether the turn of ``group`` has passed."""
        return group in self._order[: self.turn]

    def measured(self) -> list[int]:
        """The indices of all groups, in the order in which they were ready in this backward.

        A group that was not ready keeps its place before the same neighbour: it may get gradients in the next backward.
        """
        order = sorted(self._ready, key=lambda group: group in self.stays_open)
        for group, following in zip(reversed(self._order), [None, *reversed(self._order)], strict=False):
            if group not in self._ready:
                order.insert(order.index(following) if following else len(order), group)
        order.sort(key=lambda group: group in self.stays_open)
        return [group.index for group in order]

    def adopt(self, order: Sequence[int]) -> None:
        """All ranks take the ``order`` that rank 0 has measured."""
        self._order = [self._groups[index] for index in order]

    def end_backward(self) -> None:
        """The backward has ended: the next one begins with the first turn."""
        self.turn = 0
        self._ready.clear()


# Below: pure functions over the indices of groups, so that all ranks compute the same order from the same rows.


def follows(chain: Iterable[int], order: Sequence[int]) -> bool:
    """Whether the groups of ``chain`` appear in ``order`` in the same sequence, with any groups in between."""
    remaining = iter(order)
    return all(group in remaining for group in chain)


def merged(order: Sequence[int], chains: Iterable[tuple[int, ...]]) -> list[int]:
    """The groups of ``order``, reordered so that every chain of ``chains`` follows it, if such an order exists.

    Groups that no chain relates keep their sequence in ``order``: an ``order`` that all chains follow is returned
    unchanged. If two chains contradict each other, the earlier one counts.
    """
    distinct = [deque(chain) for chain in dict.fromkeys(chains)]
    containing = defaultdict[int, list[deque[int]]](list)
    for chain in distinct:
        for group in chain:
            containing[group].append(chain)
    position = {group: number for number, group in enumerate(order)}
    # For each group, the number of chains in which another group precedes it. A group with none may come next.
    preceded = Counter(group for chain in distinct for group in list(chain)[1:])
    ready = [position[group] for group in order if not preceded[group]]
    result = list[int]()
    while len(result) < len(order):
        group = order[heappop(ready)] if ready else next(chain[0] for chain in distinct if chain)
        result.append(group)
        for chain in containing[group]:
            if chain[0] != group:  # a contradiction: an earlier chain decides, so this one loses the group
                chain.remove(group)
                continue
            chain.popleft()
            if chain:
                preceded[chain[0]] -= 1
                if not preceded[chain[0]]:
                    heappush(ready, position[chain[0]])
    return result
