"""Parameters that every rank keeps whole though it steps only its shard: stages 1 and 2, and small ones in stage 3.

After a step the ranks gather the updated shards in place. A group is gathered as soon as it and the groups before it
were stepped, while others are still being stepped. When that is depends on the disk of a rank; the order does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zero3.params.layout import shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives
from zero3.ranks.process_groups import Pending


class Replicas:
    """Keeps those of ``groups`` equal on all ranks that are not sharded: ``self.groups``."""

    def __init__(self, groups: Iterable[ParamGroup], collectives: Collectives) -> None:
        self.groups = [
            g for g in groups if not g.sharded and g.shard.trainable_numel < g.layout.trainable_numel
        ]
        self._collectives = collectives
        self._waiting: deque[ParamGroup] = deque()
        self._stepped: set[ParamGroup] = set()
        self._under_way: deque[Pending] = deque()

    def begin(self) -> None:
        """Begin a step: all groups wait for their gather."""
        self._waiting.extend(self.groups)

    def stepped(self, group: ParamGroup) -> None:
        """Gather ``group``, whose shard this rank has updated, once the groups before it are updated, too."""
        self._stepped.add(group)
        # In the order of groups, whichever of them a rank has updated first: all ranks begin the same gathers in one
        # order.
        while self._waiting and self._waiting[0] in self._stepped:
            self._gather(self._waiting.popleft())

    def finish(self) -> None:
        """End a step on this rank: gather the remaining groups, and wait for all gathers."""
        # Groups in which nothing was updated here: another rank may have updated its shard of them.
        while self._waiting:
            self._gather(self._waiting.popleft())
        self._stepped.clear()
        # Until then the transport reads this rank's shards, and writes the others, in the parameters themselves.
        while self._under_way:
            self._collectives.finish(self._under_way.popleft(), "gather")

    def _gather(self, group: ParamGroup) -> None:
        home, world = group.home.tensor, self._collectives.world
        assert home is not None
        # In place: a rank sends its part of the tensor into which it receives the others.
        whole = home.view(group.dtype)[: group.layout.trainable_numel]
        local = shard_ranges(group.layout, world.partition_size, world.partition_rank)[0]
        label = f"gather the updated {group.name!r}"
        # Foreseen: every rank gathers all of these groups, in this order, in each step.
        self._collectives.announce(label, foreseen=True)
        self._under_way.append(self._collectives.gather(whole, whole[local.start : local.stop], label))
