"""The order in which groups are reduced, from the order in which each rank needs them. Pure; groups are numbers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


def follows(chain: Iterable[int], order: Sequence[int]) -> bool:
    """Whether the groups of ``chain`` come in ``order`` one after the other, whatever is between them."""
    rest = iter(order)
    return all(group in rest for group in chain)


def merged(order: Sequence[int], chains: Iterable[tuple[int, ...]]) -> list[int]:
    """All groups of ``order``, so that every one of ``chains`` follows, if there is such an order.

    Between groups that no chain orders, the one that is first in ``order`` comes first: an ``order`` that all chains
    follow is returned as it is. Where two chains contradict each other, the earlier one counts.
    """
    distinct = [deque(chain) for chain in dict.fromkeys(chains)]
    containing = defaultdict[int, list[deque[int]]](list)
    for chain in distinct:
        for group in chain:
            containing[group].append(chain)
    place = {group: number for number, group in enumerate(order)}
    # Of each group: the chains in which others come before it. What has none may come next, in the order of places.
    behind = Counter(group for chain in distinct for group in list(chain)[1:])
    free = [place[group] for group in order if not behind[group]]
    result = list[int]()
    while len(result) < len(order):
        group = order[heappop(free)] if free else next(chain[0] for chain in distinct if chain)
        result.append(group)
        for chain in containing[group]:
            if chain[0] != group:  # a contradiction: this chain does not count here
                chain.remove(group)
                continue
            chain.popleft()
            if chain:
                behind[chain[0]] -= 1
                if not behind[chain[0]]:
                    heappush(free, place[chain[0]])
    return result
