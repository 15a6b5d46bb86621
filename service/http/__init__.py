"""What is between a socket and the application: where tierd listens, and whom it answers."""

from __future__ import annotations

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8471
