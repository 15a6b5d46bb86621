"""The shape that answers share: runs, and in each the ranks that ``?run=`` and ``?rank=`` leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import BaseModel, Field

from service.view import RankView, View

Answer = TypeVar("Answer", bound="OfRank")


class OfRank(BaseModel):
    """What is told of one rank."""

    rank: int


class OfRun(BaseModel, Generic[Answer]):
    """One run, with those of its ranks on this node that say anything about what is asked."""

    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str = Field(description="as configured; several runs may have the same")
    ranks: list[Answer]


class ByRank(BaseModel, Generic[Answer]):
    """Every run that is asked for."""

    runs: list[OfRun[Answer]]


def by_rank(
    view: View, run: str | None, rank: int | None, told: Callable[[RankView], Answer | None]
) -> ByRank[Answer]:
    """``told`` of every rank that is asked for; ranks of which it returns None are left out.

    Raises NotHereError where what is asked for is not on this node.
    """
    return ByRank[Answer](
        runs=[
            OfRun[Answer](
                id=one.id,
                name=one.name,
                ranks=[answer for each in one.ranks if (answer := told(each)) is not None],
            )
            for one in view.select(run, rank)
        ]
    )
