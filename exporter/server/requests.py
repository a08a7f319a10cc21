"""Reads requests: bodies, query parameters and headers. What is wrong raises `Refusal`."""

import asyncio
import re
from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from exporter.engine.model import Checkpoint, Seconds
from exporter.server.schemas import Problem, VerdictRequest
from exporter.settings import LONGEST_WAIT, Limits


RETRY_AFTER = 2
"""Seconds in the Retry-After header of a 503."""

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
"""A JSON number, as the OpenAPI document promises."""

_CHECKPOINTS = " or ".join(Checkpoint)

_requests = msgspec.json.Decoder(VerdictRequest)


class Refusal(Exception):
    """A refused request, with the HTTP status and what was expected."""

    def __init__(
        self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail)
        self.headers = headers or {}


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """Read the whole body. Raises `Refusal` if it is too large, too slow or broken."""
    try:
        if request.content.is_eof():
            # The body came with the head: skip the timeout, which takes 7 of the 30 us.
            return await request.read()
        async with asyncio.timeout(limits.request_timeout):
            return await request.read()
    except TimeoutError:
        raise Refusal(
            408,
            "Too slow",
            f"the body did not arrive within {limits.request_timeout:g} s (limits.requestTimeout)",
            {hdrs.CONNECTION: "close"},
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(
            413,
            "Body too large",
            f"the body may have at most {limits.body_bytes} bytes (limits.bodyBytes)",
        ) from None
    except web.RequestPayloadError:
        raise Refusal(400, "Broken body", "the body does not match the request's headers") from None


def decode_verdicts(body: bytes) -> VerdictRequest:
    """Decode a verdict request. Raises `Refusal`."""
    try:
        return _requests.decode(body)
    except msgspec.ValidationError as error:
        detail = str(error)
        if detail.startswith("Invalid enum value"):
            # The error does not list the valid values; only the checkpoint is an enum.
            detail += f": expected {_CHECKPOINTS}"
        raise Refusal(422, "Not a verdict request", detail) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, "Not JSON", f"the body is not JSON: {error}") from None


def read_checkpoint(request: web.Request) -> Checkpoint | None:
    """The query parameter `checkpoint`. Raises `Refusal`."""
    value = request.query.get("checkpoint")
    if value is None:
        return None
    try:
        return Checkpoint(value)
    except ValueError:
        raise Refusal(422, "No such checkpoint", f"checkpoint: expected {_CHECKPOINTS}") from None


def read_wait(request: web.Request) -> Seconds:
    """The query parameter `wait`; 0 if absent. Raises `Refusal`."""
    value = request.query.get("wait")
    if value is None:
        return 0.0
    expected = f"wait: expected seconds from 0 to {LONGEST_WAIT:g}"
    if not _SECONDS.fullmatch(value):
        raise Refusal(422, "Not a number of seconds", expected)
    wait = float(value)
    if not 0 <= wait <= LONGEST_WAIT:
        raise Refusal(422, "Out of range", expected)
    return wait


def read_etags(request: web.Request) -> list[str]:
    """The ETags in If-None-Match, without the prefix `W/` of weak ones."""
    tags = ",".join(request.headers.getall(hdrs.IF_NONE_MATCH, [])).split(",")
    return [tag.strip().removeprefix("W/") for tag in tags]
