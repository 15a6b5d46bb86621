"""torch.distributed.checkpoint in one process: its FileSystemWriter as it comes, which flushes its files by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from frame.reference_model import Model

from .saver import serve_saver
from .state import InMemory


class TorchDcp(InMemory):
    """It loads into the tensors that are there."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        super().__init__(model)
        self.about = f"torch {torch.__version__}"

    def save(self, directory: str) -> None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)

    def load(self, directory: str) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)


if __name__ == "__main__":
    serve_saver(TorchDcp)
