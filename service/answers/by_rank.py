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
    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str
    ranks: list[Answer]


class ByRank(BaseModel, Generic[Answer]):
    runs: list[OfRun[Answer]]


def by_rank(
    view: View, run: str | None, rank: int | None, told: Callable[[RankView], Answer | None]
) -> ByRank[Answer]:
    """``told`` of every rank that is asked for; ranks of which it returns None are left out."""
    found = []
    for one in view.runs:
        if run in (None, one.id):
            answers = [told(each) for each in one.ranks if rank in (None, each.rank)]
            kept = [answer for answer in answers if answer is not None]
            found.append(OfRun[Answer](id=one.id, name=one.name, ranks=kept))
    return ByRank[Answer](runs=found)
