"""Scripts in one process, each as ``python SCRIPT ARGUMENT...`` would run it: torch is imported, and ranks meet, once.

The only argument is a list of their command lines, in JSON. A line "== SCRIPT" goes before what rank 0 prints.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        if os.environ["RANK"] == "0":
            print(f"== {command[0]}", flush=True)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
