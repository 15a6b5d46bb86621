"""What a rule yields, by how grave it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Severity = Literal["info", "warning", "error"]


class Advice(BaseModel):
    """One thing that deserves attention."""

    code: str = Field(description="stable, for programs: nvme-bound, io-errors, rank-missing, ...")
    severity: Severity
    ranks: list[int] = Field(description="whom it is about; empty: the whole run")
    text: str = Field(description="what is the case, with its figures")
    remedy: str = Field(description="what to do about it; empty where nothing is to be done")


def error(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """The run has stopped, or what it computes cannot be trusted."""
    return Advice(code=code, severity="error", ranks=list(ranks), text=text, remedy=remedy)


def warning(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """The run goes on, and could do better, or soon will not."""
    return Advice(code=code, severity="warning", ranks=list(ranks), text=text, remedy=remedy)


def info(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """Worth knowing, nothing more."""
    return Advice(code=code, severity="info", ranks=list(ranks), text=text, remedy=remedy)
