"""Bodies of answers that are sent part by part."""

import asyncio

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload


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
