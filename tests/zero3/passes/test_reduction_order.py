"""The order of reductions, from what each rank has used: every rank's order is kept where that can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero3.passes.reduction_order import follows, merged

orders = st.integers(1, 8).flatmap(lambda count: st.permutations(range(count)))


def chosen(order: list[int], data: st.DataObject) -> tuple[int, ...]:
    """Some groups of ``order``, in that order."""
    return tuple(group for group in order if data.draw(st.booleans()))


def test_an_order_that_all_ranks_keep_stays() -> None:
    assert merged([3, 2, 1, 0], [(3, 1), (2, 0), ()]) == [3, 2, 1, 0]


def test_towers_that_change_places() -> None:
    assert merged([3, 2, 1, 0], [(1, 0, 3, 2)] * 4) == [1, 0, 3, 2]


def test_what_only_some_ranks_use_finds_its_place_in_the_new_order() -> None:
    assert merged([3, 2, 1, 0], [(0, 3), (1, 0, 2)]) == [1, 0, 3, 2]


def test_an_earlier_rank_counts_where_two_contradict_each_other() -> None:
    assert merged([0, 1, 2], [(2, 1, 0), (0, 1, 2)]) == [2, 1, 0]


@given(order=orders, data=st.data())
def test_chains_of_one_order_are_all_followed(order: list[int], data: st.DataObject) -> None:
    now = data.draw(st.permutations(order))
    chains = [chosen(now, data) for _ in range(data.draw(st.integers(0, 4)))]
    result = merged(order, chains)
    assert sorted(result) == sorted(order)
    assert all(follows(chain, result) for chain in chains)


@given(order=orders, data=st.data())
def test_an_order_that_chains_follow_does_not_change(order: list[int], data: st.DataObject) -> None:
    assert merged(order, [chosen(order, data) for _ in range(3)]) == order


@given(order=orders, data=st.data())
def test_every_group_has_one_turn_whatever_ranks_say(order: list[int], data: st.DataObject) -> None:
    chains = [chosen(data.draw(st.permutations(order)), data) for _ in range(4)]
    result = merged(order, chains)
    assert sorted(result) == sorted(order)
    assert follows(chains[0], result)


def test_follows() -> None:
    assert follows((3, 1), [3, 2, 1, 0])
    assert not follows((1, 3), [3, 2, 1, 0])
    assert follows((), [])
