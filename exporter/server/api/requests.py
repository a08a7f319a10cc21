"""Reads requests: bodies, paths, query parameters and headers. Invalid input raises `Refusal`."""

import asyncio
import re

import msgspec
from aiohttp import StreamReader, hdrs, web
from msgspec import Struct

from exporter.engine.facts.model import Checkpoint, Seconds
from exporter.errors import MALFORMED
from exporter.server.fields import LONGEST_NAME, Name, Namespace, Remark, Uid
from exporter.server.http.problems import Refusal
from exporter.settings import LONGEST_WAIT, Limits
from exporter.settings.values import Address


_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
"""A JSON number, as the OpenAPI document promises."""
_PORT = re.compile(r":[0-9]*$", re.ASCII)
_TYPES = re.compile(r"`[^`$]*`")
"""A type in backticks in an error message of msgspec. A path in backticks begins with $."""
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_JSON_NAMES = {"str": "string", "bool": "boolean", "int": "number", "float": "number"}

_CHECKPOINTS = " or ".join(Checkpoint)


class Candidate(Struct, rename="camel", gc=False):
    """A VMI whose verdict is requested; `vmiUid` is its pod's label `kubevirt.io/created-by`."""

    namespace: Namespace
    """the VMI's namespace"""
    name: Name
    """the VMI's name: the pod's annotation kubevirt.io/domain"""
    vmi_uid: Uid | None = None
    """the pod's label kubevirt.io/created-by; absent: any UID"""
    node: Remark | None = None
    """for the log only"""
    pod: Remark | None = None
    """for the log only"""


class VerdictRequest(Struct, rename="camel"):
    """The candidates, the checkpoint (if absent, both checkpoints), and whether it is a dry run.

    A null counts as an empty list or an absent field, because Go clients send null instead.
    """

    candidates: list[Candidate] | None
    """the VMIs to judge, at most limits.candidates"""
    checkpoint: Checkpoint | None = None
    """only its own rules apply; absent: all rules, as is right if in doubt"""
    dry_run: bool | None = False
    """true: the answer is not counted or logged, and no Event is written"""


_requests = msgspec.json.Decoder(VerdictRequest)


def refuse_unwanted(request: web.Request, hosts: frozenset[str] | None) -> None:
    """Raise `Refusal` for a compressed body, and for a request from a page of another site.

    `hosts`: the names that `Host` may have, besides those of the loopback interface; None: any
    name. This protects a listener that needs no credentials from DNS rebinding: another site gives
    its own host name the address of this listener, so that its page can read the answers. Then
    `Host` has the name of that site.
    """
    if hdrs.CONTENT_ENCODING in request.headers:
        detail = "Content-Encoding: expected none, because bodies are not decompressed"
        raise Refusal(415, "Compressed body", detail, {hdrs.CONNECTION: "close"})
    host = request.headers.get(hdrs.HOST, "")
    origin = request.headers.get(hdrs.ORIGIN)
    is_foreign = origin is not None and origin.partition("://")[2] != host
    if is_foreign or request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise Refusal(403, "Cross-site request", "a web page of another site sent this request")
    if hosts is None or isinstance(request.get_extra_info("sockname"), str):
        return
    name = _PORT.sub("", host).strip("[]").lower()
    if not (name in hosts or name.endswith(".localhost") or Address(name).is_local):
        raise Refusal(
            403,
            "Unknown host",
            f"Host: expected localhost or one of listen.hosts, got {host[:200]!r}",
        )


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """Read the whole body. Raises `Refusal` if it is too large, too slow or broken."""
    try:
        if request.content.is_eof():
            # The body has arrived together with the head, so there is nothing to wait for.
            body = request.content.read_nowait()
        else:
            async with asyncio.timeout(limits.request_timeout):
                body = await _read_bounded(request.content, limits)
    except TimeoutError:
        raise Refusal(
            408,
            "Too slow",
            f"the body did not arrive within {limits.request_timeout:g} s (limits.requestTimeout)",
            {hdrs.CONNECTION: "close"},
        ) from None
    except web.RequestPayloadError:
        raise Refusal(400, "Broken body", "the body does not match the request's headers") from None
    if len(body) > limits.body_bytes:
        raise _too_large(limits)
    return body


async def _read_bounded(content: StreamReader, limits: Limits) -> bytes:
    """Read a body. An idle connection would keep what `request.read` returns."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> Refusal:
    detail = f"the body may have at most {limits.body_bytes} bytes (limits.bodyBytes)"
    return Refusal(413, "Body too large", detail)


def decode_verdicts(body: bytes) -> VerdictRequest:
    """Decode a verdict request. Raises `Refusal`."""
    try:
        return _requests.decode(body)
    except msgspec.ValidationError as error:
        detail = _TYPES.sub(_name_types, str(error))
        if detail.startswith("Invalid enum value"):
            # msgspec does not list the valid values. The checkpoint is the only enum here.
            detail += f": expected {_CHECKPOINTS}"
        raise Refusal(422, "Not a verdict request", detail) from None
    except UnicodeDecodeError as error:
        # A lone surrogate in UTF-8 begins with this byte.
        is_surrogate = error.object[error.start : error.start + 1] == b"\xed"
        kind = "a lone surrogate" if is_surrogate else "a byte that is not UTF-8"
        raise Refusal(400, "Not JSON", f"the body is not JSON: it has {kind}") from None
    except MALFORMED as error:
        # Near the end of the body, msgspec says only that the body is truncated.
        lone = "surrogate" in str(error) or _LONE_SURROGATE.search(body)
        detail = "it has a lone surrogate" if lone else str(error)
        raise Refusal(400, "Not JSON", f"the body is not JSON: {detail}") from None


def _name_types(quoted: re.Match[str]) -> str:
    """Replace Python's names of types by JSON's names."""
    return re.sub(r"\w+", lambda word: _JSON_NAMES.get(word[0], word[0]), quoted[0])


def read_name(request: web.Request, field: str, longest: int) -> str:
    """A name in the path. Raises `Refusal` if it is too long."""
    name = request.match_info[field]
    if len(name) > longest:
        raise Refusal(422, "Too long", f"{field}: at most {longest} characters")
    return name


def read_asked_name(request: web.Request) -> str:
    """The query parameter `name`. Raises `Refusal` if it is missing, empty or too long."""
    name = request.query.get("name", "")
    if not 0 < len(name) <= LONGEST_NAME:
        raise Refusal(422, "No name", f"name: expected 1 to {LONGEST_NAME} characters")
    return name


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
    if wait > LONGEST_WAIT:
        raise Refusal(422, "Out of range", expected)
    return wait


def accepts_gzip(request: web.Request) -> bool:
    """Whether the caller takes an answer in gzip."""
    accepted = ",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, [])).lower().split(",")
    weights = {
        coding.strip(): weight.strip()
        for coding, _, weight in (entry.partition(";") for entry in accepted)
    }
    # The weight 0 means "not acceptable" (RFC 9110, 12.4.2).
    return weights.get("gzip", "q=0").rstrip("0.") != "q="


def read_etags(request: web.Request) -> list[str]:
    """The ETags in If-None-Match, without the prefix `W/` of weak ones."""
    tags = ",".join(request.headers.getall(hdrs.IF_NONE_MATCH, [])).split(",")
    return [tag.strip().removeprefix("W/") for tag in tags]
