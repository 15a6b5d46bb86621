"""DeepSpeedCPUAdam in a process and an environment of its own: one flat parameter in shared memory, driven from stdin.

Run by the peers' interpreter, so: the standard library, torch and deepspeed only. A job's result is the milliseconds
that it took, measured here around the work only, and this process' CPU seconds when it was called and when it was done:
what lies between a result and the next call was spent idle.

The whole job is what ZeRO-Offload does around a step: the bf16 gradient is cast into an fp32 buffer, the step reads
fp32 gradients, and the fp32 master is copied into the bf16 parameter. DeepSpeedCPUAdam 0.19 has no fused copy-out; with
bf16 parameters it would step them without a master, which is another algorithm.
"""

from __future__ import annotations

import os
import time
from typing import Any

from frame.child import serve

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Worker:
    """The tensors, and the jobs on them."""

    def __init__(
        self, threads: int, numel: int, descriptor: int, nbytes: int, starts: dict[str, int]
    ) -> None:
        import deepspeed
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        from . import values

        torch.set_num_threads(threads)
        pages = values.Pages(nbytes, descriptor)
        array = {
            name: pages.at(start, numel, torch.bfloat16 if name.startswith("half") else torch.float32)
            for name, start in starts.items()
        }
        self.odd = values.odd
        self.parameter = torch.nn.Parameter(array["parameter"])
        self.parameter.grad = self.grad = array["grad"]
        self.half_grad, self.half_out = array["half_grad"], array["half_out"]
        self.optimizer = DeepSpeedCPUAdam([self.parameter], adamw_mode=True, **values.HYPER)
        self.optimizer.step()
        self.optimizer.state[self.parameter].update(exp_avg=array["exp_avg"], exp_avg_sq=array["exp_avg_sq"])
        arithmetic = CPUAdamBuilder().simd_width().strip("-D_")
        self.about = f"DeepSpeedCPUAdam {deepspeed.__version__} ({arithmetic}, torch {torch.__version__})"

    def facts(self) -> dict[str, Any]:
        return {"about": self.about}

    def step(self) -> None:
        self.optimizer.step()

    def whole(self) -> None:
        self.grad.copy_(self.half_grad)
        self.optimizer.step()
        self.half_out.copy_(self.parameter.detach())

    def run(self, job: str) -> dict[str, float]:
        """Do ``job``, "step" or "whole"."""
        work = {"step": self.step, "whole": self.whole}[job]
        cpu_start, began = time.process_time(), time.perf_counter()
        work()
        end = time.perf_counter()
        return {"ms": 1e3 * (end - began), "asked": cpu_start, "done": time.process_time()}

    def check(self) -> dict[str, Any]:
        state = self.optimizer.state[self.parameter]
        tensors = (self.parameter, state["exp_avg"], state["exp_avg_sq"], self.half_out)
        return {"odd": sum(map(self.odd, tensors)), "step": int(state["step"])}

    def close(self) -> None:
        """Its arrays are the benchmark's."""


if __name__ == "__main__":
    serve(Worker)
