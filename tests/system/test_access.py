"""Who may ask: real tokens and roles on a real API server, and one that cannot be asked."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs

from exporter.kube.client import ApiServer, Login, Unreachable
from exporter.server.access import (
    LONGEST_TOKEN,
    RETRY,
    Access,
    CannotTell,
    Forbidden,
    Unauthenticated,
)
from tests.cluster import RealCluster, User
from tests.cluster.access import allow
from tests.support.api_servers import RealStage
from tests.support.relay import Gate


KEEP = 10.0
OUTAGE = 100.0
_numbers = count(1)


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def a_caller(cluster: RealCluster, *rules: tuple[str, str]) -> User:
    """A service account that may do these, as (verb, non-resource URL)."""
    name = f"caller-{next(_numbers)}"
    user = await cluster.user(name, [])
    asks = ({"nonResourceURLs": [url], "verbs": [verb]} for verb, url in rules)
    await allow(cluster.admin, user, f"{name}-asks", *asks)
    return user


@asynccontextmanager
async def checking(real: RealStage, url: str | None = None) -> AsyncIterator[tuple[Access, Clock]]:
    """What decides for the length of the block, with an account that may ask for reviews."""
    clock = Clock()
    login = Login(kubeconfig=real.cluster.kubeconfig(real.cluster.administrator))
    if url is not None:
        login = real.login_at(url)
    async with ApiServer(login, read_timeout=5) as api:
        yield Access(api, keep=KEEP, outage=OUTAGE, clock=clock), clock


class CountingApi(ApiServer):
    """The real API server; how often it was asked, and a way to have it fail."""

    reviews = 0
    failures = 0
    fails = False

    async def review(self, path: str, body: Mapping[str, Any]) -> bytes:
        if self.fails:
            self.failures += 1
            raise Unreachable("gone")
        self.reviews += 1
        return await super().review(path, body)


@asynccontextmanager
async def counting(real: RealStage) -> AsyncIterator[tuple[Access, Clock, CountingApi]]:
    """The same, with what it asks of the API server."""
    clock = Clock()
    login = Login(kubeconfig=real.cluster.kubeconfig(real.cluster.administrator))
    async with CountingApi(login, read_timeout=5) as api:
        yield Access(api, keep=KEEP, outage=OUTAGE, clock=clock), clock, api


def bearer(user: User) -> str:
    """The header that a caller sends."""
    return f"Bearer {user.token}"


async def test_a_caller_may_do_what_its_role_says(real: RealStage) -> None:
    """By verb and path, with the wildcards of non-resource URLs."""
    caller = await a_caller(real.cluster, ("post", "/v1/verdicts"), ("get", "/v1/*"))
    async with checking(real) as (access, _):
        await access.check(bearer(caller), "POST", "/v1/verdicts")
        await access.check(bearer(caller), "GET", "/v1/vmis/shop/db1")
        await access.check(f"bearer  {caller.token} ", "GET", "/v1/blocked")
        for method, path in (("GET", "/metrics"), ("POST", "/v1/blocked"), ("GET", "/")):
            with pytest.raises(Forbidden) as refused:
                await access.check(bearer(caller), method, path)
            assert str(refused.value) == (
                f"{caller.name} may not {method.lower()} the non-resource URL {path}"
            )


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic dXNlcjpwYXNz",
        "token",
        f"Bearer {'x' * (LONGEST_TOKEN + 1)}",
    ],
    ids=["none", "empty", "no-token", "blank", "basic", "no-scheme", "too-long"],
)
async def test_what_is_no_token(real: RealStage, header: str | None) -> None:
    """It is not even asked about; what was expected is said, and nothing of what was sent."""
    async with Gate(real.url) as gate, checking(real, gate.url) as (access, _):
        await gate.shut()
        with pytest.raises(Unauthenticated) as refused:
            await access.check(header, "GET", "/metrics")
    assert str(refused.value) == "expected the header Authorization: Bearer TOKEN"


async def test_a_token_that_nobody_knows(real: RealStage) -> None:
    """Invented, or somebody else's cluster's: the token itself is in no message."""
    async with checking(real) as (access, _):
        with pytest.raises(Unauthenticated) as refused:
            await access.check("Bearer very-secret", "GET", "/metrics")
    assert "very-secret" not in str(refused.value) + repr(refused.value.__context__)


async def test_answers_hold_for_a_while(real: RealStage) -> None:
    """While they do, nobody is asked; then the API server is, again."""
    caller = await a_caller(real.cluster, ("get", "/metrics"))
    async with counting(real) as (access, clock, asked):
        for _ in range(3):
            await access.check(bearer(caller), "GET", "/metrics")
            with pytest.raises(Unauthenticated):
                await access.check("Bearer unknown", "GET", "/metrics")
            clock.now += KEEP / 4
        assert asked.reviews == 3, "two tokens and one permission"
        clock.now = KEEP
        await access.check(bearer(caller), "GET", "/metrics")
        assert asked.reviews == 5, "the token and the permission again"


async def test_what_was_granted_outlives_an_outage(real: RealStage) -> None:
    """Where the API server is away a yes holds on, at once and for so long; nobody new gets in."""
    caller = await a_caller(real.cluster, ("get", "/metrics"))
    async with counting(real) as (access, clock, asked):
        await access.check(bearer(caller), "GET", "/metrics")
        asked.fails = True
        clock.now = KEEP
        for _ in range(20):
            await access.check(bearer(caller), "GET", "/metrics")
        assert asked.failures == 2, "one for the token, one for the permission"
        with pytest.raises(CannotTell) as refused:
            await access.check("Bearer new", "GET", "/metrics")
        assert str(refused.value) == "the cluster's API server could not be asked who you are"
        clock.now = OUTAGE
        with pytest.raises(CannotTell):
            await access.check(bearer(caller), "GET", "/metrics")
        asked.fails = False
        clock.now += RETRY
        await access.check(bearer(caller), "GET", "/metrics")


async def test_a_herd_asks_once(real: RealStage) -> None:
    """Whoever wants to know while a question is under way gets its answer."""
    caller = await a_caller(real.cluster, ("get", "/metrics"))
    async with counting(real) as (access, _, asked):
        checks = (access.check(bearer(caller), "GET", "/metrics") for _ in range(200))
        await asyncio.gather(*checks)
        assert asked.reviews == 2


async def test_an_account_that_may_not_ask(real: RealStage) -> None:
    """Without permission for reviews nobody is let in, and the reason is told."""
    async with ApiServer(real.login, read_timeout=5) as api:
        access = Access(api, keep=KEEP, outage=OUTAGE, clock=Clock())
        with pytest.raises(CannotTell), capture_logs() as logs:
            await access.check("Bearer x", "GET", "/metrics")
    assert "403" in logs[0]["why"]


async def test_what_is_kept_is_bounded(real: RealStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a new token with each request, or asks for new paths, fills no memory."""
    monkeypatch.setattr("exporter.server.access.REMEMBERED", 3)
    caller = await a_caller(real.cluster, ("get", "/v1/*"))
    async with checking(real) as (access, _):
        for number in range(6):
            with pytest.raises(Unauthenticated):
                await access.check(f"Bearer invented-{number}", "GET", "/metrics")
            await access.check(bearer(caller), "GET", f"/v1/vmis/shop/{number}")
        assert access.remembered <= 9, "three users, three strangers, three permissions"
