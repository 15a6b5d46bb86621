"""The exit codes of every command of tierbench."""

from __future__ import annotations

OK = 0
FAILED = 1
"""A transfer failed, ``--verify`` found wrong bytes, or what was found cannot be printed."""
USAGE = 2
"""Usage error; the code that argparse uses."""
UNSAFE = 3
"""Refused: it could do harm, or would not measure what it says."""
BELOW = 4
"""Slower than ``--fail-under``."""
INTERRUPTED = 130
"""Ended by Ctrl-C, SIGTERM or SIGHUP; what was measured is printed."""
