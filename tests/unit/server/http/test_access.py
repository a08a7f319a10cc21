"""Access checks: their caches, and an API server that does not answer."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from exporter.kube.client import ApiServer
from exporter.kube.login import Login
from exporter.server.http.access import (
    ASKED_AT_ONCE,
    Access,
)
from exporter.server.http.problems import Refusal
from tests.support.serving import refused
from tests.support.skipped_time import in_its_own_time, now


KEEP = 10.0
FEW = 20


class HangingApi(ApiServer):
    """An API server that allows every review, and does not answer while it `hangs`.

    The user of a token is the part before its first `-`. Tokens of the user `invented` are refused.
    `asked` has the time of each review, and its token or user. `body` replaces every answer.
    """

    def __init__(self) -> None:
        super().__init__(Login(url="unused"), read_timeout=5)
        self.asked: list[tuple[float, str]] = []
        self.hangs = False
        self.body: bytes | None = None

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        who = "token" if path.endswith("/tokenreviews") else "user"
        subject = body["spec"][who]
        self.asked.append((now(), subject))
        if self.hangs:
            await asyncio.Event().wait()
        user, _, _ = subject.partition("-")
        status = {"authenticated": user != "invented", "user": {"username": user}, "allowed": True}
        return msgspec.json.encode({"status": status}) if self.body is None else self.body


@in_its_own_time
async def test_hanging_reviews_of_strangers_delay_no_known_caller() -> None:
    """If the reviews of unknown callers hang, a known caller waits at most 0.25 s."""
    api = HangingApi()
    access = Access(api, keep=KEEP, outage=10 * KEEP, clock=now)
    await access.check("Bearer alice", "GET", "/metrics")
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
    await access.check("Bearer alice", "GET", "/metrics")

    assert now() <= began + 0.25
    assert api.asked == [(began, "alice"), (now(), "alice")], "the token, then the permission"
    refusals = await asyncio.gather(*strangers, return_exceptions=True)
    statuses = {refusal.problem.status for refusal in refusals if isinstance(refusal, Refusal)}
    assert statuses == {503}
    assert all(isinstance(refusal, Refusal) for refusal in refusals)


@pytest.mark.parametrize(
    "body",
    [b'{"x":' + b"[" * 100_000, b'{"status":{"user":{"username":"\xff"}}}'],
    ids=["nested", "utf-8"],
)
@in_its_own_time
async def test_a_malformed_review(body: bytes) -> None:
    """A malformed review is no answer: a cached yes still counts, and a stranger gets 503."""
    api = HangingApi()
    access = Access(api, keep=KEEP, outage=10 * KEEP, clock=now)
    await access.check("Bearer alice", "GET", "/metrics")
    api.body = body
    await asyncio.sleep(KEEP)

    await access.check("Bearer alice", "GET", "/metrics")
    with refused(503):
        await access.check("Bearer bob", "GET", "/metrics")


@in_its_own_time
async def test_one_user_s_paths_and_tokens_throw_out_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One user's many paths and tokens do not remove another caller's permission from the cache."""
    monkeypatch.setattr("exporter.server.http.access.REMEMBERED", FEW)
    api = HangingApi()
    access = Access(api, keep=KEEP, outage=1000 * KEEP, clock=now)
    await access.check("Bearer alice", "GET", "/metrics")
    for number in range(2 * FEW):
        await access.check(f"Bearer mallory-{number}", "GET", f"/v1/vmis/shop/{number}")
    api.asked.clear()
    await access.check(f"Bearer mallory-{FEW}", "GET", f"/v1/vmis/shop/{FEW}")
    assert len(api.asked) == 2, "neither this token nor this permission is cached any more"
    api.hangs = True
    await asyncio.sleep(KEEP)

    await access.check("Bearer alice", "GET", "/metrics")


@in_its_own_time
async def test_invented_tokens_of_one_peer_throw_out_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One peer's many invented tokens do not remove another peer's refusal from the cache."""
    monkeypatch.setattr("exporter.server.http.access.REMEMBERED", FEW)
    api = HangingApi()
    access = Access(api, keep=KEEP, outage=10 * KEEP, clock=now)
    with refused(401):
        await access.check("Bearer invented-here", "GET", "/metrics", peer="10.0.0.1")
    for number in range(2 * FEW):
        with refused(401):
            await access.check(f"Bearer invented-{number}", "GET", "/metrics", peer="10.0.0.2")
    api.asked.clear()

    with refused(401):
        await access.check("Bearer invented-here", "GET", "/metrics", peer="10.0.0.1")

    assert api.asked == []
    with refused(401):
        await access.check(f"Bearer invented-{FEW}", "GET", "/metrics", peer="10.0.0.2")
    assert len(api.asked) == 1, "the cache holds no more answers than it may"
