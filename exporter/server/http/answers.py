"""Answers that are sent part by part, and answers that are given again without the handler."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from exporter.engine.facts.model import Seconds


SERVER = "kubevirt-eviction-exporter"
"""What answers say in the header `Server`."""
END_OF_HEAD = b"\r\n\r\n"
LONGEST_REPEATED = 2**12
"""The most bytes of a request, and of its answer, that are kept for the next request."""
REPEATED_FOR: Seconds = 1.0
"""How long. After that aiohttp gets the head, so its date, timeouts and the caller are checked."""

_LENGTH = re.compile(rb"(?<=\r\ncontent-length: )[0-9]+(?=\r\n|$)", re.IGNORECASE)


class Parts(Payload):
    """A body whose parts are released when they are sent. Other tasks run after each part.

    To send 2 MB at once would block for 4 ms. `shared`: other answers hold the same parts, so they
    do not count as memory of this one.
    """

    def __init__(self, parts: list[bytes], content_type: str, *, shared: bool = False) -> None:
        super().__init__(parts, content_type=content_type)
        self._parts = parts
        self._shared = shared

    @property
    def size(self) -> int:
        """How many bytes are still to be sent."""
        return sum(map(len, self._parts))

    @property
    def held(self) -> int:
        """How many bytes only this body holds."""
        return 0 if self._shared else self.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The text of the parts that are not sent."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send and release all parts."""
        self._parts.reverse()
        while self._parts:
            await writer.write(self._parts.pop())
            await asyncio.sleep(0)


class Repeatable(web.Response):
    """An answer after which the connection's next request may need neither aiohttp nor the handler.

    It does not if its head is the same, apart from the length of its body. Then `answer_again` gets
    the body, and what it returns is the body of an answer that is otherwise the same as this one.
    If it returns None or fails, the handler gets the request.
    """

    def __init__(self, answer_again: Callable[[bytes], bytes | None], **options: Any) -> None:
        """`options` are those of `web.Response`."""
        super().__init__(**options)
        self.answer_again = answer_again


class Template:
    """The heads of a request and of its answer, each without the length of its body."""

    def __init__(self, request: bytes, answer: bytes, again: Repeatable, until: Seconds) -> None:
        """`until`: how long it may be used, by the event loop's clock."""
        self._request = _LENGTH.split(request.partition(END_OF_HEAD)[0])
        self._answer = _LENGTH.split(answer.partition(END_OF_HEAD)[0])
        self._answer_again = again.answer_again
        self._until = until

    def read_body(self, request: bytes) -> bytes | None:
        """The body, if these bytes are one whole request with this head."""
        head, end, body = request.partition(END_OF_HEAD)
        return body if end and head == _fill(self._request, body) else None

    def answer(self, request: bytes, now: Seconds) -> bytes | None:
        """The answer to a request with this head; None if it needs the handler."""
        asked = self.read_body(request) if now < self._until else None
        if asked is None:
            return None
        try:
            body = self._answer_again(asked)
        except Exception:  # noqa: BLE001 (the handler fails too, and says why)
            return None
        head = None if body is None else _fill(self._answer, body)
        return None if head is None or body is None else head + END_OF_HEAD + body


def _fill(head: list[bytes], body: bytes) -> bytes | None:
    """A head with the length of this body; None if a body has no place there."""
    if len(head) > 1:
        return b"%b%d%b" % (head[0], len(body), head[-1])
    return None if body else head[0]
