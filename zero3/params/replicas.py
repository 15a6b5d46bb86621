"""Parameters that every rank keeps whole though each steps only its shard: stages 1 and 2, and small ones in stage 3.

After a step the ranks gather each other's shards in place. A group is gathered as soon as it and those before it were
stepped, while others are stepped still; which of them that is depends on a rank's disk, the order does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zero3.params.layout import shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives
from zero3.ranks.process_groups import Pending


class Replicas:
    """Keeps those of ``groups`` alike on all ranks that are not sharded."""

    def __init__(self, groups: Iterable[ParamGroup], collectives: Collectives) -> None:
        self._groups = [
            g for g in groups if not g.sharded and g.shard.trainable_numel < g.layout.trainable_numel
        ]
        self._collectives = collectives
        self._waiting: deque[ParamGroup] = deque()
        self._stepped: set[ParamGroup] = set()
        self._under_way: deque[Pending] = deque()

    def begin(self) -> None:
        """A step begins."""
        self._waiting.extend(self._groups)

    def stepped(self, group: ParamGroup) -> None:
        """This rank's shard of ``group`` is updated."""
        self._stepped.add(group)
        while self._waiting and self._waiting[0] in self._stepped:
            self._gather(self._waiting.popleft())

    def finish(self) -> None:
        """The step has ended on this rank: gather the rest, and wait until all is there."""
        while self._waiting:
            self._gather(self._waiting.popleft())
        self._stepped.clear()
        while self._under_way:
            self._collectives.finish(self._under_way.popleft(), "gather")

    def _gather(self, group: ParamGroup) -> None:
        home, world = group.home.tensor, self._collectives.world
        assert home is not None
        whole = home.view(group.dtype)[: group.layout.trainable_numel]
        mine = shard_ranges(group.layout, world.size, world.rank)[0]
        what = f"gather the updated {group.name!r}"
        self._collectives.announce(what, foreseen=True)
        self._under_way.append(self._collectives.gather(whole, whole[mine.start : mine.stop], what))
