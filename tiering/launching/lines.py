"""Command lines that start the ranks of a job: torchrun on each node, or srun or mpirun for all nodes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiering.errors import ConfigError
from tiering.launching.nodes import Node
from tiering.launching.program import Program

PORT = 29500

# Settings of libraries that ranks on other nodes need, too. Others: in the file .deepspeed_env.
_EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "TIERING_", "UCX_", "PYTHON", "OMP_")
ENVIRONMENT_FILE = ".deepspeed_env"


@dataclass(frozen=True)
class Job:
    """A ``program`` on the slots of ``nodes``. Rank 0 listens on ``port`` of ``address``; None: torchrun chooses.

    ``selects_gpus`` means that ranks see only the GPUs of their slots. The options are added to the lines. ``cores`` is
    a list for taskset. Ranks on other nodes get the variables ``exports``, and those of ``environment_script``.
    """

    program: Program
    nodes: tuple[Node, ...]
    address: str
    port: int | None
    selects_gpus: bool
    torchrun_options: tuple[str, ...] = ()
    launcher_options: tuple[str, ...] = ()
    cores: str = ""
    environment_script: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(len(node.slots) for node in self.nodes)


def visible_devices(job: Job, node: Node) -> dict[str, str]:
    """The variable that makes the slots of ``node`` the only GPUs of its ranks."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.slots))} if job.selects_gpus else {}


def torchrun(job: Job, node: Node) -> list[str]:
    """The line that starts the ranks of ``node``."""
    if len(job.nodes) == 1 and job.port is None:
        meeting = ["--standalone"]
    else:
        meeting = [
            f"--nnodes={len(job.nodes)}",
            f"--node-rank={job.nodes.index(node)}",
            f"--master-addr={job.address}",
            f"--master-port={job.port or PORT}",
        ]
    return [
        *(("taskset", "-c", job.cores) if job.cores else ()),
        *(sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={len(node.slots)}"),
        *(*job.torchrun_options, *job.program.for_torchrun()),
    ]


def shell_line(job: Job, node: Node) -> str:
    """``torchrun`` of ``node`` as a line for a shell on that node, in this directory and with its variables."""
    steps = [f". {shlex.quote(job.environment_script)}"] if job.environment_script else []
    steps.append(f"cd {shlex.quote(str(Path.cwd()))}")
    variables = [f"{name}={value}" for name, value in {**job.exports, **visible_devices(job, node)}.items()]
    # The process of the shell becomes that of torchrun, which gets the signals.
    steps.append(f"exec {shlex.join(['env', *variables, *torchrun(job, node)])}")
    return " && ".join(steps)


def srun(job: Job, *, gpus_per_node: int | None, names_nodes: bool) -> list[str]:
    """The line that starts one task per rank in a SLURM allocation.

    Raises ConfigError for slots that srun cannot select.
    """
    per_node = _equal_slots(job, "srun")
    if not all(node.takes_first_slots for node in job.nodes):
        raise ConfigError(
            "srun cannot select GPUs by their numbers; include whole nodes, or use --num_gpus for the first ones"
        )
    line = ["srun", f"--nodes={len(job.nodes)}", f"--ntasks-per-node={per_node}"]
    if names_nodes:
        line.append(f"--nodelist={','.join(node.name for node in job.nodes)}")
    if gpus_per_node is not None and job.selects_gpus:
        line.append(f"--gpus-per-node={gpus_per_node}")
    # SLURM jobs share nodes: without a port, the ranks derive one from the number of the job.
    exports = dict(job.exports) | ({"MASTER_PORT": str(job.port)} if job.port else {})
    line.append(",".join(["--export=ALL", *(f"{name}={value}" for name, value in exports.items())]))
    return [*line, *job.launcher_options, *job.program.command()]


def mpirun(job: Job, *, launcher: str) -> list[str]:
    """The line that starts one process per rank with Open MPI ("openmpi"), MPICH ("mpich") or Intel MPI ("impi")."""
    exports = dict(job.exports) | {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port or PORT)}
    if launcher == "openmpi":
        hosts = ",".join(f"{node.name}:{len(node.slots)}" for node in job.nodes)
        line = ["mpirun", "-n", str(job.ranks), "--host", hosts]
        line += [part for name, value in exports.items() for part in ("-x", f"{name}={value}")]
    else:
        per_node = _equal_slots(job, "mpirun")
        hosts = ",".join(node.name for node in job.nodes)
        line = ["mpirun", "-n", str(job.ranks), "-ppn", str(per_node), "-hosts", hosts]
        line += [part for name, value in exports.items() for part in ("-genv", name, value)]
    return [*line, *job.launcher_options, *job.program.command()]


def _equal_slots(job: Job, program: str) -> int:
    counts = {len(node.slots) for node in job.nodes}
    if len(counts) > 1:
        slots = ", ".join(f"{node.name} {len(node.slots)}" for node in job.nodes)
        raise ConfigError(
            f"{program} starts the same number of ranks on each node, but the slots are {slots}; use"
            " --num_gpus, or --launcher pdsh"
        )
    return counts.pop()


def exported_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other nodes get: those of libraries, and the lines of .deepspeed_env.

    The file is read in the home directory and in this one; the variable DS_ENV_FILE names another one. Raises
    ConfigError for a line without "=".
    """
    exports = {name: value for name, value in environ.items() if name.startswith(_EXPORTED)}
    name = environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    for path in dict.fromkeys((Path.home() / name, Path(name))):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not equals or not key.strip().isidentifier():
                raise ConfigError(f"{path}:{number}: {line!r} is not a variable; write 'NAME=VALUE'")
            exports[key.strip()] = value.strip()
    return exports


def text(line: Sequence[str], variables: Mapping[str, str]) -> str:
    """``line`` with ``variables`` before it, as a shell reads it."""
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(line)]
    )
