"""An engine that swaps to NVMe and trains on one core until its input ends.

``python -m sidecar.trainer JSON`` prints "ready", and then a line per step: when it began and when it was over, by the
monotonic clock that all processes share. A line of input, "publish" or "hush", turns its page on or off between steps.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {settings["core"]})  # before there are threads

    import torch
    from frame.reference_model import Model
    from step.ours import configuration

    import tiering

    torch.set_num_threads(1)
    steps = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not a step
    model = Model(settings["width"], settings["layers"])
    config = configuration(
        {
            "directory": settings["directory"],
            "tiering": {
                "cache_in_host": False,
                "run_name": "bench",
                "telemetry": {"dir": settings["run_directory"]},
            },
        }
    )
    engine = tiering.initialize(model=model.build(), config=config).engine
    print("ready", file=steps)
    with engine:
        for tokens, targets in model.batches():
            began = time.monotonic()
            engine.backward(engine(tokens, targets))
            engine.step()
            print(began, time.monotonic(), file=steps)
            if select.select([sys.stdin], [], [], 0)[0]:
                match sys.stdin.readline():
                    case "publish\n":
                        engine._observation.publisher = engine._observation.record.publish(
                            engine.settings.tiering.telemetry
                        )
                    case "hush\n":
                        assert engine._observation.publisher is not None
                        engine._observation.publisher.close()
                    case "":
                        return


if __name__ == "__main__":
    main()
