"""torch.save into one file and fsync; torch.load, and its tensors copied into those of the model and the optimizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from frame.reference_model import Model

from .saver import serve_saver
from .state import InMemory

FILE = "state.pt"


class TorchSave(InMemory):
    """As most loops do it."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        super().__init__(model)
        self.about = f"torch {torch.__version__}"

    def save(self, directory: str) -> None:
        path = Path(directory)
        path.mkdir()
        with (path / FILE).open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, directory: str, mmap: bool = False) -> None:
        """``mmap``: its tensors are pages of the file, which are read as they are copied."""
        loaded = torch.load(Path(directory) / FILE, mmap=mmap, weights_only=True)
        for kind, tensors in loaded.items():
            for name, tensor in tensors.items():
                self.state[kind][name].copy_(tensor)


if __name__ == "__main__":
    serve_saver(TorchSave)
