"""The exit codes of every command of tierbench."""

from __future__ import annotations

OK = 0
FAILED = 1
"""A transfer failed, ``--verify`` found wrong bytes, or the results cannot be printed."""
USAGE = 2
"""Usage error; the code that argparse uses."""
UNSAFE = 3
"""Refused: the run could do harm, or would measure something other than the drive."""
BELOW = 4
"""Slower than ``--fail-under``."""
INTERRUPTED = 130
"""Ended by Ctrl-C, SIGTERM or SIGHUP; the results so far are printed."""
