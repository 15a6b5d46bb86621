"""The process of a side: it builds its worker once, and then answers calls until its input ends.

Each line of input is a call in JSON, ``[method, arguments]``; each line of output is its result. The first call has the
arguments of the worker itself, and is answered by the worker's ``facts()``. A call that raises is answered by
``{"error": message}``; its traceback goes to standard error, and the process ends. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

START = "start"
ERROR = "error"


class Worker(Protocol):
    """What a side's process holds; its other methods are what the benchmark calls."""

    def facts(self) -> dict[str, Any]:
        """What is known of it once it is built."""

    def close(self) -> None: ...


def serve(make: Callable[..., Worker]) -> None:
    """Answer calls of the worker that ``make`` builds, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker: Any = None
    try:
        for line in sys.stdin:
            method, arguments = json.loads(line)
            if method == START:
                worker = make(**arguments)
                result = worker.facts()
            else:
                result = getattr(worker, method)(**arguments)
            print(json.dumps(result), file=answers, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({ERROR: f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        sys.exit(1)
    finally:
        if worker is not None:
            worker.close()
