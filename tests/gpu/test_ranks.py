"""Ranks with GPUs: two of them where there are two, or two that share one and send each other's bytes by way of CPUs.

This file is also the script that ranks run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))

from tests.gpu.conftest import DEVICE, FAKE, SmallModel, batches, config

pytestmark = pytest.mark.gpu

CPU, NVME = {"offload_optimizer": "cpu"}, {"offload_optimizer": "nvme", "cache_in_host": False}
PLACES: list[tuple[int, dict[str, Any]]] = [
    *((stage, offload) for stage in (3, 2, 1) for offload in ({}, CPU, NVME)),
    (0, {}),
    (3, {**CPU, "offload_param": "cpu"}),
    (3, {**NVME, "offload_param": "nvme"}),
    (3, {**NVME, "offload_param": "nvme", "prefetch": 0}),
]
FEW = [PLACES[0], PLACES[4], PLACES[8], PLACES[9], PLACES[10], PLACES[11]]
PAUSE = 300_000_000  # cycles of the device, more than 0.1 s
SHORT = 2_000_000  # about a millisecond
LIMIT = 150  # seconds
GATHERS = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def ranks(count: int, *arguments: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Start this file ``count`` times. No torchrun, which ends the others when one has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        **environment,
    }
    variables |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "2"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they have written, when all have ended: they end themselves if they take too long."""
    try:
        return [process.communicate(timeout=2 * LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def of_two_gpus() -> None:
    if FAKE or torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed, torch finds {torch.cuda.device_count()}")


def test_nccl_runs_on_the_streams_that_it_is_told_on(cuda: None) -> None:
    """NCCL alone with itself: what is told after an event comes after it, and compute goes on meanwhile."""
    (process,) = ranks(1, "alone")
    (output,) = outputs([process])
    assert process.returncode == 0, output
    assert output.endswith("alone\n"), output


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_stage_and_placement_gives_the_same_bits(nvme: Path, precision: str) -> None:
    """Also when every collective begins late, and every copy."""
    processes = ranks(2, "places", str(nvme), precision)
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n----\n".join(texts)
    digests = [line.split()[1] for each in texts for line in each.splitlines() if line.startswith("digest ")]
    assert len(digests) == 2 * (len(PLACES if precision == "bf16" else FEW) + len(FEW)), "\n----\n".join(
        texts
    )
    if not FAKE:  # whose square roots are not rounded as those of our kernels
        assert len(set(digests)) == 1, "\n----\n".join(texts)


def test_compute_is_told_of_everything_while_other_ranks_are_slow(nvme: Path) -> None:
    """No collective, and nothing that ranks agree on, makes the CPU wait for its GPU."""
    of_two_gpus()
    processes = ranks(2, "quiet", str(nvme))
    texts = outputs(processes)
    if "torch's own" in texts[0]:
        pytest.skip(texts[0].splitlines()[-1])
    assert [process.returncode for process in processes] == [0, 0], "\n----\n".join(texts)


def test_a_rank_that_dies_ends_the_other_with_its_name(nvme: Path) -> None:
    """The other's GPU waits in NCCL, and its CPU for the GPU: neither would ever end."""
    of_two_gpus()
    output, _ = outputs(ranks(2, "die", str(nvme)))
    assert "lost: [TIER-RANK-LOST] rank 1 (host" in output, output
    assert "closed" in output.splitlines(), output


# ---- what ranks run ----


def alone() -> None:
    from tiering.config.training import DistributedConfig
    from zero3.device.streams import streams_of
    from zero3.device.timeline import StallClock, Timeline
    from zero3.ranks.collectives import Collectives
    from zero3.ranks.joining import World, meet

    device = torch.device("cuda", torch.cuda.current_device())
    meet("cpu:gloo,cuda:nccl", timedelta(seconds=60))
    streams = streams_of(device)
    assert streams is not None
    stalls = StallClock(Timeline(), streams)
    collectives = Collectives(World(), device, DistributedConfig(), stalls, streams)

    def bring(shard: Tensor, value: float) -> Any:
        """A copy to the device that takes long to begin."""
        pinned = torch.full_like(shard, value, device="cpu").pin_memory()
        with streams.fetch.running():
            torch.cuda._sleep(PAUSE)
            shard.copy_(pinned, non_blocking=True)
        return streams.fetch.record()

    shard, whole = (torch.zeros(1 << 20, device=device) for _ in range(2))
    torch.cuda.synchronize()
    copied = bring(shard, 1.0)
    collectives.announce("gather 'a'", foreseen=True)
    gather = collectives.gather(whole, shard, "gather 'a'", after=[copied])
    streams.compute.record().wait()
    assert gather.end_event is not None
    assert not gather.end_event.done(), "compute was waited for, or the gather did not wait"
    collectives.finish(gather, "gather")
    copy = whole.clone()
    assert copy.eq(1.0).all(), "compute did not wait for the gather, or the gather not for the copy"

    brought = bring(shard, 2.0)
    collectives.announce("gather 'a'", foreseen=True)
    collectives.finish(collectives.gather(whole, shard, "gather 'a'", after=[]), "gather")
    assert whole.eq(1.0).all(), "this proves nothing: bytes are right without a wait"
    brought.wait()

    torch.cuda._sleep(PAUSE)
    sent, received = torch.full_like(whole, 3.0), torch.zeros_like(whole)
    exchange = collectives.exchange(received, sent, "reduce 'a'")
    del sent
    collectives.finish(exchange, "reduce")
    assert received.eq(3.0).all()
    collectives.close()
    collectives.close()
    dist.destroy_process_group()


def through_cpus(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Two ranks on one GPU: NCCL refuses. In the order of the stream that it is told on, all the same."""

    def call(received: Tensor, sent: Tensor, **kwargs: Any) -> Any:
        if not received.is_cuda:
            return collective(received, sent, **kwargs)
        here, there = torch.empty_like(received, device="cpu"), sent.cpu()
        collective(here, there, **kwargs)
        received.copy_(here)
        return None

    return call


@contextlib.contextmanager
def late(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams that carry collectives and copies stop for a while, now and then, before what they are told next."""
    from zero3.device.streams import CudaStream

    running, chance = CudaStream.running, random.Random(os.environ["RANK"])

    @contextlib.contextmanager
    def slowly(stream: CudaStream) -> Iterator[None]:
        with running(stream):
            if chance.random() < 0.3:
                torch.cuda._sleep(SHORT)
            yield

    with patch.context() as within:
        if not FAKE:
            within.setattr(CudaStream, "running", slowly)
        yield


def train(
    nvme: Path, precision: str, stage: int, options: dict[str, Any], steps: int = 3
) -> Iterator[tuple[str, Any]]:
    """The engine "before" each forward, "behind" its backward, and "trained"."""
    import tiering

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings = config(nvme, precision=precision, **options) | {"train_micro_batch_size_per_gpu": 4 // size}
    settings["zero_optimization"]["stage"] = stage
    torch.manual_seed(rank)  # rank 0's values count
    with tiering.initialize(model=SmallModel(), config=settings).engine as engine:
        for tokens, targets in batches(steps):
            yield "before", engine
            engine.backward(engine(tokens.chunk(size)[rank], targets.chunk(size)[rank]))
            yield "behind", engine
            engine.step()
        yield "trained", engine


def digest(nvme: Path, precision: str, stage: int, options: dict[str, Any]) -> None:
    """Print one of the norms and masters that a training on all ranks leaves."""
    norms, trained = [], b""
    for when, engine in train(nvme, precision, stage, options):
        if when == "behind":
            norms.append(engine.get_global_grad_norm())
        elif when == "trained":
            trained = b"".join(master.numpy().tobytes() for master in engine.master_state_dict().values())
    print(f"digest {zlib.crc32(trained + repr(norms).encode()):08x} stage {stage}, {options}", flush=True)


def places(nvme: str, precision: str, patch: pytest.MonkeyPatch) -> None:
    for place in PLACES if precision == "bf16" else FEW:
        digest(Path(nvme), precision, *place)
    with late(patch):
        for place in FEW:
            digest(Path(nvme), precision, *place)


def quiet(nvme: str) -> None:
    """Steady passes while torch refuses to wait for the device."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    plain, batch = SmallModel().to(DEVICE), next(batches(1))
    plain(*batch).backward()  # cuBLAS takes its workspace
    torch.cuda.set_sync_debug_mode("error")
    try:
        plain(*batch).backward()
    except RuntimeError as error:
        print(f"torch's own operations wait here: {error}")
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    passes = train(Path(nvme), "bf16", 3, {**CPU, "offload_param": "cpu"}, steps=6)
    for number, (when, _) in enumerate(passes):
        steady = when == "before" and number >= 6  # orders are recorded by then
        torch.cuda.set_sync_debug_mode("error" if steady else "default")


def die(nvme: str) -> None:
    from tiering.errors import RankLostError

    options = {**CPU, "offload_param": "cpu", "distributed": {"timeout": 60, "silence": 5}}
    try:
        for number, _ in enumerate(train(Path(nvme), "bf16", 3, options, steps=100)):
            if number == 6 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
    except RankLostError as error:
        print(f"lost: {error}\nclosed", flush=True)


def main(scenario: str, *arguments: str) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if FAKE:
            from tests.fakes.fake_device import FakeDevice

            stack.enter_context(FakeDevice()).run_engines(patch)
        elif torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            from zero3.ranks import collectives

            patch.setitem(collectives.TRANSPORTS, "cuda", "gloo")
            patch.setattr(collectives, "check_apart", lambda gpus: None)
            for name in (GATHERS, "all_to_all_single"):
                patch.setattr(dist, name, through_cpus(getattr(dist, name)))
        if scenario == "places":
            places(*arguments, patch=patch)
        else:
            {"alone": alone, "quiet": quiet, "die": die}[scenario](*arguments)
    print(scenario)


if __name__ == "__main__":
    os.environ |= {"TIERING_DEVICE": DEVICE.type, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    main(*sys.argv[1:])
