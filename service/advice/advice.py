"""The Advice model, and a constructor for each severity."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Severity = Literal["info", "warning", "error"]


class Advice(BaseModel):
    """A problem of a run, with a remedy."""

    code: str = Field(description="stable identifier for programs: nvme-bound, io-errors, rank-missing, ...")
    severity: Severity
    ranks: list[int] = Field(description="affected ranks; empty: the whole run")
    text: str = Field(description="description of the problem, with figures")
    remedy: str = Field(description="suggested action; empty if none is needed")


def error(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """The run has stopped, or its results cannot be trusted."""
    return Advice(code=code, severity="error", ranks=list(ranks), text=text, remedy=remedy)


def warning(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """The run continues, but is slower than necessary or will soon fail."""
    return Advice(code=code, severity="warning", ranks=list(ranks), text=text, remedy=remedy)


def info(code: str, text: str, remedy: str, *ranks: int) -> Advice:
    """A hint; no action is necessary."""
    return Advice(code=code, severity="info", ranks=list(ranks), text=text, remedy=remedy)
