"""The processes that a loop counts, and the ranks that train together.

accelerate counts the ranks of a launcher where each has an accelerator, and on CPUs only with ``cpu=True``, with which
it does not use DeepSpeed. Otherwise it counts one process, and each rank would train on all batches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tiering import comm
from tiering.errors import EngineStateError
from tiering.utils import groups

STATE = "accelerate.state"
"""The module that counts processes."""


def count(state: Any, is_wanted: Callable[[], bool]) -> None:
    """Let the module ``state`` count ranks on CPUs while ``is_wanted`` is true. A second call changes nothing."""
    chosen = state.PartialState._prepare_backend
    if hasattr(chosen, "__wrapped__"):
        return

    @functools.wraps(chosen)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        found = chosen(self, cpu, sagemaker_dp, backend)
        if (
            found[1] == state.DistributedType.NO
            and is_wanted()
            and state.get_cpu_distributed_information().world_size > 1
        ):
            # accelerate replaces the kind by that of DeepSpeed afterwards, as it does with GPUs.
            return chosen(self, True, sagemaker_dp, backend)
        return found

    state.PartialState._prepare_backend = prepare_backend


def check_accelerate() -> None:
    """``check`` what accelerate counts, if it uses DeepSpeed in this process."""
    state = sys.modules.get(STATE)
    if state is None or not state.AcceleratorState._shared_state:
        return
    shared = state.AcceleratorState()
    if shared.distributed_type == state.DistributedType.DEEPSPEED:
        check(shared.num_processes)


def check(processes: int) -> None:
    """Raise EngineStateError unless ``processes``, which the loop counts, is the number of ranks."""
    ranks = comm.get_world_size()
    if processes != ranks:
        raise EngineStateError(
            f"{ranks} ranks train together, but the loop counts {processes}, so that ranks would train on the same"
            " batches; start them by torchrun, `accelerate launch` or `tiering launch`. On CPUs, also pass cpu=True to"
            " the first object of accelerate (Accelerator or PartialState), or use_cpu=True to TrainingArguments"
        )


@contextmanager
def counted(processes: int) -> Iterator[None]:
    """Check ``processes`` before and after the block, in which an engine starts, and that no ranks share sequences.

    The engine may find its ranks in the variables of srun or mpirun.
    """
    check(processes)
    yield
    check(processes)
    if (shared := groups._get_sequence_parallel_world_size()) > 1:
        raise EngineStateError(
            f"sequence_parallel_size {shared}: ranks would share sequences, but this loop loads different data on each"
            " rank; remove the key, or write the loop with tiering.initialize and tiering.sequence"
        )
