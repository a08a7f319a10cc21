"""Who may ask: what it costs a known caller that the API server does not answer."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from exporter.kube.client import ApiServer, Login
from exporter.server.access import ASKED_AT_ONCE, Access, ReviewUnavailable
from tests.support.skipped_time import in_its_own_time, now


KEEP = 10.0


class HangingApi(ApiServer):
    """An API server that grants every review, and answers none any more once it `hangs`.

    `asked` is the token or the user of each review, with the instant at which it came.
    """

    def __init__(self) -> None:
        super().__init__(Login(url="unused"), read_timeout=5)
        self.asked: list[tuple[float, str]] = []
        self.hangs = False

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        who = "token" if path.endswith("/tokenreviews") else "user"
        self.asked.append((now(), body["spec"][who]))
        if self.hangs:
            await asyncio.Event().wait()
        return msgspec.json.encode(
            {"status": {"authenticated": True, "user": {"username": "alice"}, "allowed": True}}
        )


@in_its_own_time
async def test_hanging_reviews_of_strangers_delay_no_known_caller() -> None:
    """A known caller's renewal is sent at once, and its kept yes decides within 0.25 s."""
    api = HangingApi()
    access = Access(api, keep=KEEP, outage=10 * KEEP, clock=now)
    await access.check("Bearer known", "GET", "/metrics")
    await asyncio.sleep(KEEP)
    api.hangs = True
    api.asked.clear()
    strangers = [
        asyncio.create_task(access.check(f"Bearer invented-{number}", "GET", "/metrics"))
        for number in range(3 * ASKED_AT_ONCE)
    ]
    await asyncio.sleep(0.1)
    assert len(api.asked) == ASKED_AT_ONCE, "all other strangers wait for a slot"
    api.asked.clear()

    began = now()
    await access.check("Bearer known", "GET", "/metrics")

    assert now() <= began + 0.25
    assert api.asked == [(began, "known"), (now(), "alice")], "the token, then the permission"
    refusals = await asyncio.gather(*strangers, return_exceptions=True)
    assert {type(refusal) for refusal in refusals} == {ReviewUnavailable}
