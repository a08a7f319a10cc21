"""`admission.observe`: the requesters of evacuations in API and page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exporter.server.admission.handlers import Admission
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.settings import AdmissionMode, AdmissionSettings
from tests.support.builders import NOW, Json, a_running_state, a_vmi
from tests.support.reviews import DESCHEDULER, a_review
from tests.unit.server.admission.test_handlers import LISTED, Webhook
from tests.unit.server.api.test_handlers import served


@asynccontextmanager
async def observing(*, observe: bool = True) -> AsyncIterator[Webhook]:
    """The webhook in mode `enforce`; db1 is not blocked."""
    webhook = Webhook(AdmissionMode.ENFORCE)
    webhook.api.store.put(a_vmi())
    settings = AdmissionSettings(AdmissionMode.ENFORCE, LISTED, observe=observe)
    async with served(Admission(webhook.api.service, settings).make_app()) as session:
        webhook.session = session
        yield webhook


def by(user: str, **request: Any) -> Json:
    """The review of an eviction by this user, who has a group."""
    return a_review(userInfo={"username": user, "groups": ["admins"]}, **request)


async def read_requester(webhook: Webhook) -> object:
    """Begin db1's evacuation; returns the `requestedBy` that both endpoints give."""
    webhook.api.store.put(a_vmi(evacuation_node="n1"))
    async with served(make_query_app(webhook.api.service)) as session:
        async with session.get("/v1/evacuations") as response:
            (evacuation,) = (await response.json())["evacuations"]
        async with session.get("/v1/vmis/shop/db1") as response:
            vmi = await response.json()
    assert vmi["evacuation"]["requestedBy"] == evacuation["requestedBy"]
    return evacuation["requestedBy"]


@pytest.mark.parametrize("user", ["alice", DESCHEDULER])
async def test_who_requested_an_evacuation(user: str) -> None:
    """The requester is recorded with the time, whether the user is listed or not."""
    async with observing() as webhook:
        assert (await webhook.ask(by(user)))["allowed"]
        assert await read_requester(webhook) == {"user": user, "at": "2027-01-15T08:00:00Z"}


async def test_users_who_are_not_listed_are_not_denied() -> None:
    """Only listed users are denied, and a denied user is not recorded as the requester."""
    async with observing() as webhook:
        webhook.api.store.put(a_vmi(migration=a_running_state()))
        assert not (await webhook.ask(by(DESCHEDULER)))["allowed"]
        assert (await webhook.ask(by("alice")))["allowed"]
        assert webhook.counted() == {"denied": 1, "unlisted_user": 1}
        assert await read_requester(webhook) == {"user": "alice", "at": "2027-01-15T08:00:00Z"}


async def test_what_is_not_remembered() -> None:
    """No requester is recorded for dry runs, for other requests, or without `admission.observe`."""
    async with observing() as webhook:
        await webhook.ask(by("alice", dryRun=True))
        await webhook.ask(by("alice", subResource="binding"))
        assert await read_requester(webhook) is None
    async with observing(observe=False) as webhook:
        await webhook.ask(by(DESCHEDULER))
        assert await read_requester(webhook) is None


async def test_a_name_is_only_text() -> None:
    """A long user name is cut, control characters are escaped, and the page shows it as text."""
    async with observing() as webhook:
        await webhook.ask(by("<b>\n" + "x" * 9000))
        requester = await read_requester(webhook)
        assert requester == {"user": "<b>\\n" + "x" * 252, "at": "2027-01-15T08:00:00Z"}
        webhook.api.clock.instant = NOW + 60
        async with served(make_metrics_app(webhook.api.service, page=True)) as session:
            for path in ("/", "/vmis/shop/db1"):
                async with session.get(path) as response:
                    assert 'data-field="requestedBy">&lt;b&gt;\\nxxx' in await response.text()
