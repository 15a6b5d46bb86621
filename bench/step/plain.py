"""The loop that everyone writes for mixed precision, in plain PyTorch, on the CPU: see frame/plain_loop.py."""

from __future__ import annotations

from typing import Any

from frame.plain_loop import PlainLoop
from frame.reference_model import Model
from frame.training import serve_training


def build(model: Model, settings: dict[str, Any]) -> PlainLoop:
    return PlainLoop(model.build())


if __name__ == "__main__":
    serve_training(build)
