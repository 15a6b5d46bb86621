"""Installs the finder of deepspeed in each Python process that has this directory in its PYTHONPATH.

Python imports the first sitecustomize on its path when it starts. Another one, which this one hides, is imported, too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

try:
    from tiering.integrations import deepspeed

    deepspeed.install()
finally:
    _here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if Path(entry) != _here]
    _this = sys.modules.pop(__name__)
    try:
        import_module(__name__)
    except ModuleNotFoundError as error:
        sys.modules[__name__] = _this
        if error.name != __name__:
            raise
