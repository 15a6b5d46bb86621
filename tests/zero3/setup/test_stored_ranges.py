"""Where files have the bytes of a group: under the names of the files, which those of the model may differ from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiering.storage.read_only import FileRange
from tiering.weights.files import StoredTensor
from zero3.building.weights import FileSource
from zero3.params.grouping import GroupMembers
from zero3.params.layout import lay_out
from zero3.setup.in_place import stored_ranges


def test_ranges_have_the_names_of_the_files() -> None:
    """A search of the file for the name that an error prints finds it: peft gives the model's parameters others."""
    param = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    name = "base_model.model.up.base_layer.weight"
    layout = lay_out([(0, name, (4, 8), False)], 4, 1, {})
    members = GroupMembers("up", persistent=False, in_fp32=False)
    members.params.append((0, name, param))
    file, files = Path("model.safetensors"), Any
    stored = StoredTensor("up.weight", "F32", (4, 8), file, offset=100, nbytes=128)
    source: Any = FileSource([stored], files)  # type: ignore[arg-type] # nothing is read
    ranges = stored_ranges(layout, members, torch.float32, {param: source})
    assert ranges == (FileRange("up.weight", file, 100, 128, 0),)
