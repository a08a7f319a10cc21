"""Error responses as problem+json (RFC 9457)."""

from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from exporter.errors import ExporterError
from exporter.server.fields import Problem


PROBLEM = "application/problem+json"
RETRY_SOON: Mapping[str, str] = {hdrs.RETRY_AFTER: "2"}
"""The headers of a 503: the caller may try again after two seconds."""


class Refusal(ExporterError):
    """An error response; the detail says what is wrong, where, and what was expected."""

    def __init__(
        self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail)
        self.headers = headers or {}

    def answer(self) -> web.Response:
        """The response to the caller."""
        return web.Response(
            status=self.problem.status,
            body=msgspec.json.encode(self.problem),
            content_type=PROBLEM,
            headers=self.headers,
        )
