"""The order in which groups are reduced, computed from the order in which each rank uses them.

Pure functions over the indices of groups, so that all ranks compute the same order from the same rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


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
