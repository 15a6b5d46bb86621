"""Plain PyTorch with everything on the device: the loop of frame/plain_loop.py, whose gradients are freed."""

from __future__ import annotations

from typing import Any

from frame.plain_loop import PlainLoop

from .serve import serve
from .work import Work


def build(work: Work, settings: dict[str, Any]) -> PlainLoop:
    return PlainLoop(work.build().to(work.device), free_gradients=True)


if __name__ == "__main__":
    serve(build)
