"""The layer between a socket and the application: addresses, connections, access control."""

from __future__ import annotations

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8471
