"""Refuses unknown query parameters: a response that ignored them would mislead."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from tiering.telemetry import as_text

MAX_SHOWN = 40
"""Characters of an unknown name that the error shows."""


async def known_parameters(request: Request) -> None:
    """A dependency of routes. Raises RequestValidationError for a query parameter that the route does not have."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    names = [field.alias for field in route.dependant.query_params]
    unknown = next((candidate for candidate in request.query_params if candidate not in names), None)
    if unknown is not None:
        message = f"unknown parameter; {route.path} takes {', '.join(names) or 'none'}"
        location = ("query", as_text(unknown[:MAX_SHOWN]))
        raise RequestValidationError([{"loc": location, "msg": message, "type": "extra_forbidden"}])
