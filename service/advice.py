"""What deserves an operator's attention, in plain words, each with its remedy. Pure: a RunView in, words out."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.view import RunView


class Advice(BaseModel):
    """One thing that deserves attention."""

    code: str = Field(description="stable, for programs: stalled, io-errors, rank-missing, ...")
    severity: Literal["info", "warning", "error"]
    ranks: list[int] = Field(description="whom it is about; empty: the whole run")
    text: str = Field(description="what is the case, with its figures")
    remedy: str = Field(description="what to do about it; empty where nothing is to be done")


def advise(run: RunView) -> list[Advice]:
    """Warnings about ``run``, the gravest first."""
    return [
        Advice(code=f"rank-{rank.state}", severity="error", ranks=[rank.rank], text=rank.reason, remedy="")
        for rank in run.ranks
        if not rank.fresh
    ]
