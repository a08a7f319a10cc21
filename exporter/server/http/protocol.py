"""Passes the bytes of a connection to aiohttp and back, and counts what the connection holds.

aiohttp limits each line of a head and their number, but not the whole head, nor what it parses
ahead, nor how long a caller takes to read an answer. It keeps the last answer of an idle
connection. So its protocol gets one request at a time, from a protocol of our own, and each answer
is sent and released here. All names that are used of aiohttp and asyncio are public.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, TypeAlias

from aiohttp import hdrs, web

from exporter.engine.facts.model import Seconds
from exporter.server.http.answers import (
    END_OF_HEAD,
    LONGEST_REPEATED,
    REPEATED_FOR,
    SERVER,
    Parts,
    Repeatable,
    Template,
)
from exporter.server.http.budget import Connection, ConnectionBudget
from exporter.server.http.problems import Refusal


LONGEST_LINE = 8190
"""The most bytes of a request's first line, and of each header."""
LONGEST_HEAD = 2**14
"""The most bytes of a request's first line and headers together."""
MOST_WAITING = 2**15
"""When a connection has sent this many bytes too early, nothing more is read from it for now."""
RECEIVED_AT_ONCE = 2**15
"""The size of a connection's receive buffers in the kernel and, with TLS, before decryption."""
MOST_UNSENT = 2**15
"""How many bytes of an answer may remain in the buffer when the answer counts as sent."""
LINGERING: Seconds = 1.0
"""How long a caller has to read an answer that was sent before the request's body had ended."""
LONGEST_DETAIL = 200

_Handler: TypeAlias = Callable[[Any], Awaitable[web.StreamResponse]]


class _Stage(Enum):
    """Where a connection is. Only in `HEAD` and `BODY`, bytes are passed to aiohttp."""

    HEAD = auto()
    """The next request's head is read."""
    BEGINNING = auto()
    """aiohttp has a whole head, and has not called the handler yet."""
    BODY = auto()
    ANSWER = auto()
    CLOSING = auto()
    """The connection is about to be closed."""


_HEAD, _BEGINNING, _BODY, _ANSWER, _CLOSING = _Stage  # faster than attributes in Python 3.11


class ConnectionProtocol(asyncio.Protocol, asyncio.Transport):
    """Stands between a connection and the protocol that aiohttp's `server` makes for it.

    It is the protocol of the connection, and the transport of aiohttp's protocol. The requests must
    be handled by `answer`.
    """

    def __init__(
        self,
        server: web.Server,
        budget: ConnectionBudget,
        connection: Connection,
        *,
        patience: Seconds,
    ) -> None:
        """`patience`: how long a caller may take to read an answer."""
        self._server = server
        self._budget = budget
        self._connection = connection
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._inner: web.RequestHandler | None = None
        self._stage = _HEAD
        self._waiting = b""  # received, and not passed on yet
        self._head = 0  # how many bytes of the present head were passed on
        self._last = b""  # the last of them, which may be the beginning of `END_OF_HEAD`
        self._ahead = b""  # what was passed on together with the end of the present head
        self._left = 0  # how many bytes of the present body were not passed on yet
        self._received = 0  # bytes of requests that are not answered yet
        self._unread = 0  # bytes that the present answer holds
        self._unsent = 0  # bytes in the transport's buffer, while that is full
        self._is_paused = False  # aiohttp cannot take more
        self._is_reading = True
        self._abort: asyncio.TimerHandle | None = None
        self._arrived = b""  # what began the present request, if it is short
        self._written = b""  # what was written of its answer
        self._template: Template | None = None

    # For the event loop

    @property
    def is_made(self) -> bool:
        """Whether the connection was made: with TLS, after a successful handshake."""
        return self._inner is not None

    def connection_made(self, transport: Any) -> None:
        """Make aiohttp's protocol."""
        self._transport: asyncio.Transport = transport
        self._transport.set_write_buffer_limits(high=MOST_UNSENT)
        if self._connection.is_tls:
            transport.set_read_buffer_limits(high=RECEIVED_AT_ONCE)
        self._connection.abort = self._transport.abort
        self._inner = self._server()
        self._inner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count nothing more, and end the protocol of aiohttp."""
        self._budget.remove(self._connection)
        self._stage, self._waiting = _CLOSING, b""
        self._cancel_abort()
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count bytes, and pass them on when it is their turn."""
        if self._template is not None and self._answer_again(self._template, data):
            return
        if self._stage is not _CLOSING:
            if self._stage is _HEAD and not self._head and not self._waiting:
                self._arrived = data if len(data) <= LONGEST_REPEATED else b""
            self._received += len(data)
            self._waiting += data
            self._count()
            self._pass_on()

    def _answer_again(self, template: Template, data: bytes) -> bool:
        """Answer a request like the last one, if this is one."""
        now = self._loop.time()
        is_next = self._stage is _HEAD and not self._head and not self._unsent
        if is_next and len(data) <= LONGEST_REPEATED:
            answer = template.answer(data, now)
            if answer is not None:
                self._connection.since = now
                self._transport.write(answer)
                return True
        self._template = None
        return False

    def pause_writing(self) -> None:
        """Count what is not sent, and give the caller a time limit."""
        self._unsent = self._transport.get_write_buffer_size()
        self._count()
        self._abort_later()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        self._unsent = 0
        self._count()
        if self._inner is not None:
            self._inner.resume_writing()

    # For aiohttp's protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the connection's transport knows."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write a part of the present answer. What aiohttp answers by itself is an error."""
        if self._stage is not _BODY and self._stage is not _ANSWER:
            self._refuse(_read_refusal(bytes(data)))
            return
        if self._arrived:
            self._written += data
            if len(self._written) > LONGEST_REPEATED:
                self._arrived = self._written = b""
        self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write several parts as one."""
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        """Stop passing on bytes, because aiohttp holds many that nobody has read."""
        self._is_paused = True
        self._pass_on()

    def resume_reading(self) -> None:
        """Go on passing on bytes."""
        self._is_paused = False
        self._pass_on()

    def close(self) -> None:
        """Close the connection when its answer is sent."""
        self._stage, self._waiting = _CLOSING, b""
        if not self._transport.is_closing():
            if self._transport.get_write_buffer_size():
                self._abort_later()
            self._transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without aiohttp, and close the connection."""
        if self._stage is not _CLOSING:
            self._transport.write(refusal.write())
            self.close()

    def _abort_later(self) -> None:
        """Abort the connection if the answer is not read in time."""
        if self._abort is None:
            self._abort = self._loop.call_later(self._patience, self._connection.abort)

    def _cancel_abort(self) -> None:
        if self._abort is not None:
            self._abort.cancel()
            self._abort = None

    # Requests

    async def answer(self, request: web.BaseRequest, handler: _Handler) -> web.StreamResponse:
        """Call `handler`, send its answer and release its body."""
        self._begin(request)
        try:
            response = await handler(request)
            # By default aiohttp sends its own name and Python's, with their versions.
            response.headers.setdefault(hdrs.SERVER, SERVER)
            is_early = not request.content.is_eof()
            if is_early or self._left or response.headers.get(hdrs.CONNECTION) == "close":
                response.force_close()
            if size := _find_size(response):
                self._unread = size
                self._count()
            try:
                await response.prepare(request)
                await response.write_eof()
            except ConnectionError:
                pass  # the caller has gone; `suppress` would take longer for each request
            if isinstance(response, web.Response) and response.body is not None:
                response.body = None
            if is_early:
                await self._linger()
        except BaseException:
            if self._stage is not _CLOSING:
                self._stage = _BEGINNING  # aiohttp answers, and closes the connection
            raise
        finally:
            self._cancel_abort()
        if isinstance(response, Repeatable) and self._arrived:
            until = self._loop.time() + REPEATED_FOR
            template = Template(self._arrived, self._written, response, until)
            self._template = None if template.read_body(self._arrived) is None else template
        self._end(is_last=not response.keep_alive)
        return response

    def _begin(self, request: web.BaseRequest) -> None:
        length = 0
        if request.body_exists:
            # Where the body ends is known only to aiohttp if no header has its length.
            length = request.content_length or sys.maxsize
        ahead, self._ahead = self._ahead, b""
        over = len(ahead) - length
        self._left = max(0, -over)
        self._head = max(0, over)
        self._last = ahead[length:][-len(END_OF_HEAD) + 1 :]
        self._stage = _BODY
        self._pass_on()

    async def _linger(self) -> None:
        """Close the connection when the caller had time to read its answer; read nothing more."""
        if self._transport.is_closing():
            return
        self._stage, self._waiting = _CLOSING, b""
        self._transport.pause_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        await asyncio.sleep(LINGERING)
        self._transport.abort()

    def _end(self, *, is_last: bool) -> None:
        self._unread = 0
        self._arrived = self._written = b""
        self._received = len(self._waiting)
        if self._stage is not _CLOSING:
            self._stage = _CLOSING if is_last else _HEAD
        self._count()
        if self._waiting:
            self._pass_on()

    # Bytes

    def _pass_on(self) -> None:
        """Pass on what belongs to the present request, unless aiohttp cannot take more."""
        while self._inner is not None and not self._is_paused:
            if self._stage is _HEAD and self._waiting:
                part = self._take_head()
            elif self._stage is _BODY and self._left and self._waiting:
                part, self._waiting = self._waiting[: self._left], self._waiting[self._left :]
                self._left -= len(part)
            else:
                break
            self._inner.data_received(part)
        if self._stage is _BODY and not self._left:
            self._stage = _ANSWER
            self._connection.since = self._loop.time()
        self._regulate()

    def _take_head(self) -> bytes:
        """The next bytes of a head, which may be its last ones."""
        if not self._head:
            self._waiting = self._waiting.lstrip(b"\r\n")  # as RFC 9112, 2.2, demands
        seen = self._last + self._waiting
        end = seen.find(END_OF_HEAD)
        if end < 0:
            self._last = seen[-len(END_OF_HEAD) + 1 :]
            part, self._waiting = self._waiting, b""
        else:
            end += len(END_OF_HEAD) - len(self._last)
            part, self._waiting = self._waiting[:end], self._waiting[end:]
            self._stage = _BEGINNING
        self._head += len(part)
        if self._head > LONGEST_HEAD:
            self._refuse(_too_long(part))
            return b""
        if len(self._waiting) <= LONGEST_HEAD and END_OF_HEAD not in self._waiting:
            # Most bodies arrive with their head. There is no other whole head in them.
            self._ahead, self._waiting = self._waiting, b""
            part += self._ahead
        return part

    def _regulate(self) -> None:
        """Read nothing from the caller while too many bytes wait to be passed on."""
        is_reading = not self._is_paused and len(self._waiting) <= MOST_WAITING
        if is_reading is self._is_reading or self._stage is _CLOSING:
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _count(self) -> None:
        held = self._received + self._unread + self._unsent
        if held <= LONGEST_HEAD:
            held = 0  # within the connection's cost
        if held != self._connection.held - self._connection.cost:
            self._budget.hold(self._connection, held)


def find_protocol(request: web.BaseRequest) -> ConnectionProtocol:
    """The protocol that a request came through. Raises ConnectionError if its caller has gone."""
    if not isinstance(request.transport, ConnectionProtocol):
        raise ConnectionResetError("the caller has gone")
    return request.transport


def _too_long(part: bytes) -> Refusal:
    """The answer to a head that becomes too long with this part."""
    if max(map(len, part.split(b"\r\n"))) > LONGEST_LINE:
        detail = f"the first line and each header may have at most {LONGEST_LINE} bytes"
        return Refusal(400, "Invalid HTTP", detail)
    detail = f"first line and headers may have at most {LONGEST_HEAD} bytes together"
    return Refusal(431, "Invalid HTTP", detail)


def _find_size(response: web.StreamResponse) -> int:
    """How many bytes of memory an answer's body takes."""
    body = response.body if isinstance(response, web.Response) else None
    if body is None:
        return 0
    if isinstance(body, Parts):
        return body.held
    return len(body) if isinstance(body, bytes | bytearray) else 0


def _read_refusal(answer: bytes) -> Refusal:
    """An error that aiohttp answers in text/plain."""
    head, _, text = answer.partition(END_OF_HEAD)
    status = int(head.split()[1])
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Refusal(status, "Internal error", "Internal error")
    # In aiohttp's messages the first line ends in a colon, and invalid bytes follow it.
    line = text.decode(errors="replace").partition("\n")[0][:LONGEST_DETAIL].rstrip(": \r")
    return Refusal(status, "Invalid HTTP", line or "Invalid HTTP")
