"""Error responses as problem+json (RFC 9457)."""

from collections.abc import Mapping

import msgspec
from aiohttp import web

from exporter.server.schemas import Problem


def answer_problem(problem: Problem, headers: Mapping[str, str] | None = None) -> web.Response:
    """The HTTP response for a problem."""
    return web.Response(
        status=problem.status,
        body=msgspec.json.encode(problem),
        content_type="application/problem+json",
        headers=headers,
    )
