"""The place of this rank in a mesh: which ranks get other data, and which share the sequences of one batch.

All ranks of a mesh are ranks of the engine, which divides state among all of them and averages gradients over all of
them, whatever the dimensions are. The dimensions determine the data: batch sizes and loaders count the data ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tiering.errors import ConfigError
from zero3.device.choice import chosen_device

DATA = ("data", "dp", "data_parallel", "replicate", "shard", "dp_replicate", "dp_shard", "fsdp", "hsdp")
SEQUENCE = ("sequence", "sp", "sequence_parallel", "ulysses", "cp", "context")
OF_DEEPSPEED = ("data_parallel", "sequence_parallel")
"""Names of dimensions. Two data dimensions, such as replicate and shard, count as one."""


@dataclass(frozen=True)
class MeshPlace:
    """``data_rank`` of ``data_size``: which part of the data this rank gets. ``coordinate`` has a place by dimension.

    Ranks of equal ``data_rank`` share the sequences of a batch: ``sequence_rank`` of ``sequence_size``.
    """

    data_rank: int = 0
    data_size: int = 1
    sequence_rank: int = 0
    sequence_size: int = 1
    coordinate: Mapping[str, int] = field(default_factory=dict)

    def sharing_sequences(self, ranks: int) -> MeshPlace:
        """This place if ``ranks`` ranks share a sequence in it, else a place without a mesh in which consecutive do."""
        if ranks == self.sequence_size:
            return self
        data_rank, sequence_rank = divmod(self.data_rank, ranks)
        coordinate = {"data": data_rank, "sequence": sequence_rank}
        return MeshPlace(data_rank, self.data_size // ranks, sequence_rank, ranks, coordinate)

    def __str__(self) -> str:
        """As in errors: "data 1, sequence 0"; empty without a mesh."""
        return ", ".join(f"{name} {place}" for name, place in self.coordinate.items())


def place_of(mesh: DeviceMesh | None, mesh_param: Sequence[int] | None, mpu: Any) -> MeshPlace:
    """The place of this rank in ``mesh``, DeepSpeed's ``mesh_param`` (data, sequence), or Megatron's ``mpu``.

    At most one of them is given; without any, every rank is a data rank. Raises ConfigError for dimensions that the
    engine does not support, and for a mesh without some of the ranks.
    """
    arguments = {"mesh": mesh, "mesh_param": mesh_param, "mpu": mpu}
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"initialize got {' and '.join(given)}; pass only one of them")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mpu is not None:
        return _of_mpu(mpu, world)
    if mesh_param is not None:
        mesh = _made(mesh_param, world)
    if mesh is None:
        return MeshPlace(dist.get_rank() if world > 1 else 0, world)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"initialize(mesh=...) takes a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}"
        )
    return _of_mesh(mesh, world)


def _of_mesh(mesh: DeviceMesh, world: int) -> MeshPlace:
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim > 1:
            raise ConfigError(
                "the mesh has no names of dimensions; make it with mesh_dim_names=, such as ('data', 'sequence')"
            )
        names = DATA[:1]
    sizes, own = dict(zip(names, mesh.shape, strict=True)), mesh.get_coordinate()
    strange = [name for name in names if name not in (*DATA, *SEQUENCE) and sizes[name] > 1]
    if strange:
        raise ConfigError(
            f"the mesh has a dimension {strange[0]!r} of {sizes[strange[0]]} ranks: tensor, pipeline and expert"
            f" parallelism are not supported in this version. Data dimensions are called {', '.join(DATA)}; dimensions"
            f" whose ranks share sequences {', '.join(SEQUENCE)}"
        )
    if own is None or mesh.size() != world:
        raise ConfigError(
            f"the mesh has {mesh.size()} of the {world} ranks of this run; pass the mesh of all ranks, not a part of it"
        )
    coordinate = dict(zip(names, own, strict=True))

    def along(kinds: Sequence[str]) -> tuple[int, int]:
        place, size = 0, 1
        for name in names:
            if name in kinds:
                place, size = place * sizes[name] + coordinate[name], size * sizes[name]
        return place, size

    return MeshPlace(*along(DATA), *along(SEQUENCE), coordinate)


def _made(sizes: Sequence[int], world: int) -> DeviceMesh:
    """DeepSpeed's mesh of (data ranks, ranks of a sequence)."""
    if len(sizes) != len(OF_DEEPSPEED) or math.prod(sizes) != world:
        raise ConfigError(
            f"mesh_param {tuple(sizes)} does not fit {world} ranks; pass (data ranks, ranks that share a sequence),"
            " whose product is the number of ranks"
        )
    if world == 1:
        raise ConfigError(
            "mesh_param needs several ranks; start the program with torchrun, or remove mesh_param"
        )
    return init_device_mesh(chosen_device().type, tuple(sizes), mesh_dim_names=OF_DEEPSPEED)


def _of_mpu(mpu: Any, world: int) -> MeshPlace:
    """The place by Megatron's functions, as DeepSpeed calls them."""

    def ask(name: str, default: int) -> int:
        function = getattr(mpu, name, None)
        return default if function is None else int(function())

    models = ask("get_tensor_model_parallel_world_size", ask("get_model_parallel_world_size", 1))
    models *= ask("get_pipeline_model_parallel_world_size", 1)
    if models > 1:
        raise ConfigError(
            f"initialize got an mpu of {models} ranks for a model: tensor and pipeline parallelism are not supported in"
            " this version; start Megatron with model parallel sizes of 1"
        )
    sequences = ask("get_sequence_parallel_world_size", 1)
    data_size = ask("get_data_parallel_world_size", world // max(sequences, 1))
    if data_size * sequences != world:
        raise ConfigError(
            f"initialize got an mpu of {data_size} data ranks and {sequences} ranks that share a sequence, but the run"
            f" has {world} ranks"
        )
    rank = dist.get_rank() if world > 1 else 0
    data_rank = ask("get_data_parallel_rank", rank // sequences)
    sequence_rank = ask("get_sequence_parallel_rank", rank % sequences)
    return MeshPlace(
        data_rank, data_size, sequence_rank, sequences, {"data": data_rank, "sequence": sequence_rank}
    )
