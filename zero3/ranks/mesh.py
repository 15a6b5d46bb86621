"""The place of this rank in a mesh: which ranks get other data, and which share the sequences of one batch.

All ranks of a mesh are ranks of the engine. It divides state, and averages gradients, among those that hold the same
part of the model: today all of them. The dimensions determine the data: batch sizes and loaders count the data ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tiering._text import counted
from tiering.errors import ConfigError

DATA = ("data", "dp", "data_parallel", "replicate", "shard", "dp_replicate", "dp_shard", "fsdp", "hsdp")
SEQUENCE = ("sequence", "sp", "sequence_parallel", "ulysses", "cp", "context")
OF_DEEPSPEED = ("data_parallel", "sequence_parallel")
"""Names of dimensions. Two data dimensions, such as replicate and shard, count as one."""


@dataclass(frozen=True)
class Partition:
    """Ranks that divide state among them, by their numbers in the run, in ascending order.

    ``name`` tells them from the ranks of other partitions, such as "tensor 0"; empty if these are all ranks.
    """

    ranks: tuple[int, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def number_of(self, rank: int) -> int:
        """The number of ``rank`` of the run among these ranks, counted from 0."""
        return self.ranks.index(rank)

    def named(self, kind: str) -> str:
        """The name of a process group of these ranks, unique in an engine."""
        return f"{self.name} {kind}".lstrip()


@dataclass(frozen=True)
class MeshPlace:
    """``data_rank`` of ``data_size``: which part of the data this rank gets. ``coordinate`` has a place by dimension.

    Ranks of equal ``data_rank`` share the sequences of a batch: ``sequence_rank`` of ``sequence_size``. Ranks that hold
    the same part of the model divide its state: ``partitions`` are all of them, or empty if each rank has all of it.
    """

    data_rank: int = 0
    data_size: int = 1
    sequence_rank: int = 0
    sequence_size: int = 1
    coordinate: Mapping[str, int] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()

    @property
    def shape(self) -> str:
        """What is equal on all ranks of a mesh: the dimensions, and how many ranks load different data."""
        names = ", ".join(self.coordinate) or "no dimensions"
        return f"{names}: {self.data_size} x {self.sequence_size} ranks"

    def __str__(self) -> str:
        """As in errors: "data 1, sequence 0"; empty without a mesh."""
        return ", ".join(f"{name} {place}" for name, place in self.coordinate.items())


def place_of(
    rank: int, ranks: int, *, mesh: DeviceMesh | None, mesh_param: Sequence[int] | None, mpu: Any
) -> MeshPlace | None:
    """The place of ``rank``, of ``ranks``, in ``mesh``, in DeepSpeed's ``mesh_param``, or in Megatron's ``mpu``.

    At most one of them is given, or None. Raises ConfigError for dimensions that the engine does not support, and for
    a mesh without some of the ranks.
    """
    arguments = {"mesh": mesh, "mesh_param": mesh_param, "mpu": mpu}
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"initialize got {' and '.join(given)}; pass only one of them")
    if mpu is not None:
        return _of_mpu(mpu, rank, ranks)
    if mesh_param is not None:
        return _of_sizes(mesh_param, rank, ranks)
    return None if mesh is None else _of_mesh(mesh, ranks)


def _of_mesh(mesh: DeviceMesh, ranks: int) -> MeshPlace:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"initialize(mesh=...) takes a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}"
        )
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
    if own is None or mesh.size() != ranks:
        raise ConfigError(
            f"the mesh has {mesh.size()} of the {ranks} ranks of this run; pass the mesh of all ranks, not a part of it"
        )
    coordinate = dict(zip(names, own, strict=True))

    def along(kinds: Sequence[str]) -> tuple[int, int]:
        place, size = 0, 1
        for name in names:
            if name in kinds:
                place, size = place * sizes[name] + coordinate[name], size * sizes[name]
        return place, size

    return MeshPlace(*along(DATA), *along(SEQUENCE), coordinate)


def _of_sizes(sizes: Sequence[int], rank: int, ranks: int) -> MeshPlace:
    """DeepSpeed's mesh of (data ranks, ranks of a sequence), in which consecutive ranks share a sequence."""
    whole = isinstance(sizes, Sequence) and all(type(size) is int and size > 0 for size in sizes)
    if not whole or len(sizes) != len(OF_DEEPSPEED) or math.prod(sizes) != ranks:
        raise ConfigError(
            f"mesh_param {sizes!r} does not fit {counted(ranks, 'rank')}; pass (data ranks, ranks that share a"
            " sequence), whose product is the number of ranks"
        )
    return sharing(rank, ranks, sizes[1], OF_DEEPSPEED)


def sharing(
    rank: int, ranks: int, sequence_size: int, names: tuple[str, str] = (DATA[0], SEQUENCE[0])
) -> MeshPlace:
    """The place of ``rank`` if each ``sequence_size`` consecutive ones of all ``ranks`` share a sequence."""
    place = divmod(rank, sequence_size)
    sizes = ranks // sequence_size, sequence_size
    coordinate = dict(zip(names, place, strict=True)) if sequence_size > 1 else {}
    return MeshPlace(place[0], sizes[0], place[1], sizes[1], coordinate)


def _of_mpu(mpu: Any, rank: int, ranks: int) -> MeshPlace:
    """The place by Megatron's functions, as DeepSpeed calls them."""

    def ask(name: str, default: int) -> int:
        function = getattr(mpu, name, None)
        value = default if function is None else function()
        if type(value) is not int:
            raise ConfigError(f"initialize got an mpu whose {name}() is {value!r}, not a number of ranks")
        return value

    models = ask("get_tensor_model_parallel_world_size", ask("get_model_parallel_world_size", 1))
    models *= ask("get_pipeline_model_parallel_world_size", 1)
    if models > 1:
        raise ConfigError(
            f"initialize got an mpu of {models} ranks for a model: tensor and pipeline parallelism are not supported in"
            " this version; start Megatron with model parallel sizes of 1"
        )
    if not hasattr(mpu, "get_data_parallel_world_size"):
        raise ConfigError(
            f"initialize got {type(mpu).__name__} as mpu, which has no get_data_parallel_world_size(); pass the module"
            " mpu of Megatron, or mesh_param=(data ranks, ranks that share a sequence)"
        )
    sequences = ask("get_sequence_parallel_world_size", 1)
    data_size = ask("get_data_parallel_world_size", 1)
    if min(data_size, sequences) < 1 or data_size * sequences != ranks:
        raise ConfigError(
            f"initialize got an mpu of {counted(data_size, 'data rank')} and {counted(sequences, 'rank')} that share a"
            f" sequence, but the run has {counted(ranks, 'rank')}"
        )
    data_rank = ask("get_data_parallel_rank", rank // sequences)
    sequence_rank = ask("get_sequence_parallel_rank", rank % sequences)
    if not (0 <= data_rank < data_size and 0 <= sequence_rank < sequences):
        raise ConfigError(
            f"initialize got an mpu with data rank {data_rank} of {data_size} and rank {sequence_rank} of the"
            f" {sequences} that share a sequence; count from 0"
        )
    return MeshPlace(
        data_rank, data_size, sequence_rank, sequences, {"data": data_rank, "sequence": sequence_rank}
    )
