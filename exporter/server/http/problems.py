"""Error responses as problem+json (RFC 9457)."""

from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

import msgspec
from aiohttp import hdrs, web

from exporter.errors import ExporterError
from exporter.server.fields import Problem
from exporter.server.http.answers import END_OF_HEAD, SERVER


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

    def write(self) -> bytes:
        """The response to a caller whose connection is closed next."""
        status = HTTPStatus(self.problem.status)
        body = msgspec.json.encode(self.problem)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"{hdrs.CONTENT_TYPE}: {PROBLEM}",
            f"{hdrs.CONTENT_LENGTH}: {len(body)}",
            f"{hdrs.DATE}: {formatdate(usegmt=True)}",
            f"{hdrs.SERVER}: {SERVER}",
            f"{hdrs.CONNECTION}: close",
        )
        return "\r\n".join(head).encode() + END_OF_HEAD + body

    def answer(self) -> web.Response:
        """The response to the caller."""
        return web.Response(
            status=self.problem.status,
            body=msgspec.json.encode(self.problem),
            content_type=PROBLEM,
            headers=self.headers,
        )
