"""The admission webhook over real HTTP: its answers, metrics, log and records."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from exporter.counters import (
    USERS_ASKING,
    VMIS_ASKED_FOR,
    BlockedEviction,
    BlockedEvictions,
    ReviewOutcome,
)
from exporter.engine.facts.policy import Reason
from exporter.server.admission import handlers as admission
from exporter.server.admission.handlers import PATH, Admission
from exporter.server.admission.reviews import NotAReview, read_review
from exporter.server.api.openapi import ROUTES
from exporter.server.apps import make_query_app
from exporter.settings import AdmissionMode, AdmissionSettings
from tests.support.builders import NOW, UID, Json, a_pod, a_running_state, a_vmi
from tests.support.reviews import DESCHEDULER, REVIEW_UID, a_review, a_spoilt_review
from tests.unit.server.api.test_handlers import ServedApi, served


LISTED = (DESCHEDULER, "autoscaler")
REVIEWS = "kubevirt_eviction_exporter_admission_reviews_total"
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
COOLDOWNS = "descheduler_kubevirt_effective_cooldown_seconds_count"


class Webhook:
    """A served API in which db1 cools down, with an admission listener without TLS."""

    def __init__(self, mode: AdmissionMode) -> None:
        self.api = ServedApi()
        self.api.cool()
        self.api.store.put(a_pod())
        self.app = Admission(self.api.service, AdmissionSettings(mode, LISTED)).make_app()
        self.session: aiohttp.ClientSession

    async def send(self, body: bytes, *, method: str = "POST", path: str = PATH) -> tuple[int, Any]:
        """The status and the decoded body of an answer."""
        async with self.session.request(method, path, data=body) as response:
            return response.status, await response.json(content_type=None)

    async def ask(self, review: Json | None = None) -> Json:
        """The response to a review."""
        status, answer = await self.send(json.dumps(review or a_review()).encode())
        assert status == 200
        response: Json = answer["response"]
        return response

    async def sample(self, series: str) -> float | None:
        """The value of one series of a scrape, or None if it is absent."""
        parts, _ = await self.api.service.render_metrics("")
        lines = (line.rpartition(" ") for line in b"".join(parts).decode().splitlines())
        return next((float(value) for name, _, value in lines if name == series), None)

    def counted(self) -> dict[str, int]:
        """The outcomes that were counted."""
        return {str(outcome): n for outcome, n in (self.api.counters.reviews or {}).items() if n}


@asynccontextmanager
async def opened(mode: AdmissionMode) -> AsyncIterator[Webhook]:
    """Serve the webhook in this mode."""
    webhook = Webhook(mode)
    async with served(webhook.app) as session:
        webhook.session = session
        yield webhook


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    """The webhook in mode `enforce`."""
    async with opened(AdmissionMode.ENFORCE) as webhook:
        yield webhook


async def test_a_denial_is_counted_as_a_blocked_verdict(webhook: Webhook) -> None:
    """A denial is counted by reason and node, by outcome, in the histogram of cooldowns, and as a
    prevented move.
    """
    response = await webhook.ask()
    assert response["allowed"] is False
    assert response["status"]["code"] == 429
    assert await webhook.sample(f'{REVIEWS}{{outcome="denied"}}') == 1
    assert await webhook.sample(f"{COOLDOWNS}") == 1
    series = f'{BLOCKS}{{namespace="shop",node="n1",reason="cooldown"}}'
    assert await webhook.sample(series) == 1
    await webhook.ask()
    assert await webhook.sample(series) == 2
    assert webhook.api.counters.prevented.moves == {"shop": 1}


async def test_a_warning_is_no_block() -> None:
    """In mode `warn` only the outcome is counted, and `eviction_would_be_denied` is logged."""
    async with opened(AdmissionMode.WARN) as webhook:
        with capture_logs() as logs:
            response = await webhook.ask()
        assert response["allowed"] is True
        assert response["warnings"]
        assert webhook.counted() == {"warned": 1}
        assert webhook.api.counters.verdicts == {(None, False): 1}
        assert not webhook.api.counters.blocks
        assert not webhook.api.counters.prevented.moves
        assert webhook.api.counters.cooldowns.count == 0
    assert [log["event"] for log in logs] == ["eviction_would_be_denied"]


async def test_a_dry_run_is_judged_and_not_counted(webhook: Webhook) -> None:
    """A dry run gets the normal answer, and changes no metric, log or memory."""
    with capture_logs() as logs:
        assert (await webhook.ask(a_review(dryRun=True)))["allowed"] is False
    assert webhook.counted() == {}
    assert not webhook.api.counters.verdicts
    assert not webhook.api.counters.blocks
    assert not webhook.api.counters.blocked_evictions.of(UID)
    assert logs == []


async def test_every_outcome_is_there_from_the_start(webhook: Webhook) -> None:
    """With a webhook, every outcome is exposed from the start as 0."""
    counts = [
        await webhook.sample(f'{REVIEWS}{{outcome="{outcome}"}}') for outcome in ReviewOutcome
    ]
    assert counts == [0] * len(ReviewOutcome)
    webhook.api.counters.reviews = None
    assert await webhook.sample(f'{REVIEWS}{{outcome="denied"}}') is None


async def test_without_listed_users_only_their_outcome_is_there(webhook: Webhook) -> None:
    """Without listed users, only the outcome `unlisted_user` is exposed."""
    settings = AdmissionSettings(observe=True)
    async with served(Admission(webhook.api.service, settings).make_app()) as webhook.session:
        await webhook.ask()
    counts = {
        outcome: await webhook.sample(f'{REVIEWS}{{outcome="{outcome}"}}')
        for outcome in ReviewOutcome
    }
    assert {key: n for key, n in counts.items() if n is not None} == {"unlisted_user": 1}


async def test_outcomes(webhook: Webhook) -> None:
    """Each review counts once, by the first outcome that applies."""
    await webhook.ask(a_review(userInfo={"username": "somebody"}))
    await webhook.ask(a_review(name="web-1"))
    await webhook.ask()
    webhook.api.clock.instant += 301
    webhook.api.renew_contact()
    await webhook.ask()
    webhook.api.clock.instant += 781
    await webhook.ask()
    assert webhook.counted() == {
        "unlisted_user": 1,
        "unknown_pod": 1,
        "denied": 1,
        "allowed": 1,
        "unavailable": 1,
    }


async def test_what_is_no_eviction_is_not_counted(webhook: Webhook) -> None:
    """A review of anything but an eviction is not counted."""
    for review in (a_review(subResource="binding"), a_review(review={"apiVersion": "v2"})):
        assert (await webhook.ask(review))["allowed"]

    assert webhook.counted() == {}


async def test_a_hold_ends(webhook: Webhook) -> None:
    """After `admission.maxHold` the evictions of a denied VM are allowed, with a warning."""
    webhook.api.store.put(a_vmi(migration=a_running_state()))
    held, step = 86_400, 600
    answers = []
    for _ in range(0, held + 2 * step, step):
        answers.append((await webhook.ask())["allowed"])
        webhook.api.clock.instant += step
        webhook.api.renew_contact()
    *before, last = answers

    assert before == [False] * (held // step) + [True]
    assert last
    answer = await webhook.ask()
    (warning,) = answer["warnings"]
    assert warning.startswith(
        "kubevirt-eviction-exporter allows this eviction after admission.maxHold: VMI shop/db1:"
    )
    assert [*answer["auditAnnotations"]] == ["held-too-long"]
    assert webhook.counted()["held_too_long"] == 3


async def test_a_hold_by_a_migration_has_a_series(webhook: Webhook) -> None:
    """After `stuck.migrationTimeout` a denied VM has a series with the time of its first denial."""
    series = 'kubevirt_vmi_eviction_denied_timestamp_seconds{name="db1",namespace="shop",node="n1"}'
    webhook.api.store.put(a_vmi(migration=a_running_state()))
    began = webhook.api.clock.instant
    for _ in range(9):
        await webhook.ask()
        assert await webhook.sample(series) is None
        webhook.api.clock.instant += 800
        webhook.api.renew_contact()
    webhook.api.clock.instant += 1
    await webhook.ask()
    assert await webhook.sample(series) == began

    webhook.api.store.put(a_vmi(node="n2"))
    assert await webhook.sample(series) is None, "the VM has left the node"
    webhook.api.store.put(a_vmi(uid="of-the-next-vm"))
    assert await webhook.sample(series) is None, "the VM was recreated"
    webhook.api.store.put(a_vmi(migration=a_running_state()))
    assert await webhook.sample(series) == began
    webhook.api.clock.instant += 901
    assert await webhook.sample(series) is None


async def test_what_a_denial_logs(webhook: Webhook) -> None:
    """A denial is logged with user, pod, VMI and reason, once a minute for each user and reason."""
    with capture_logs() as logs:
        for _ in range(3):
            await webhook.ask()
        webhook.api.clock.instant += 61
        await webhook.ask()
        await webhook.ask(a_review(userInfo={"username": "autoscaler"}))
    assert [log["event"] for log in logs] == ["eviction_denied"] * 3
    assert [log["user"] for log in logs] == [DESCHEDULER, DESCHEDULER, "autoscaler"]
    assert logs[0] == {
        "event": "eviction_denied",
        "log_level": "info",
        "user": DESCHEDULER,
        "pod": "virt-launcher-db1-x",
        "namespace": "shop",
        "name": "db1",
        "node": "n1",
        "reason": "cooldown",
        "not_before": "2027-01-15T08:05:00Z",
    }


async def test_the_vmi_has_its_blocked_evictions(webhook: Webhook) -> None:
    """The API's answer about a VMI counts its blocked evictions by user, the newest first."""
    for _ in range(2):
        await webhook.ask()
    webhook.api.clock.instant += 7
    await webhook.ask(a_review(userInfo={"username": "autoscaler"}))
    async with served(make_query_app(webhook.api.service)) as session:
        webhook.session = session
        _, vmi = await webhook.send(b"", method="GET", path="/v1/vmis/shop/db1")
    held = {"reason": "cooldown", "denied": True}
    assert vmi["blockedEvictions"] == [
        {"user": "autoscaler", "at": "2027-01-15T08:00:07Z", "times": 1, **held},
        {"user": DESCHEDULER, "at": "2027-01-15T08:00:00Z", "times": 2, **held},
    ]


def test_blocked_evictions_are_bounded() -> None:
    """The list of blocked evictions has a maximum length; the oldest are dropped."""
    held = BlockedEvictions()
    for vmi in range(VMIS_ASKED_FOR + 10):
        for user in range(USERS_ASKING + 3):
            held.record(f"v{vmi}", BlockedEviction(f"u{user}", NOW, Reason.COOLDOWN, denied=True))
    assert held.of("v9") == []
    assert [eviction.user for eviction in held.of("v10")] == ["u6", "u5", "u4", "u3"]


async def test_the_log_s_memory_is_bounded(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log remembers a limited number of users, and long names are cut."""
    monkeypatch.setattr(admission, "REMEMBERED", 3)
    settings = AdmissionSettings(AdmissionMode.ENFORCE, (), ("all",))
    crowd = Admission(webhook.api.service, settings)
    async with served(crowd.make_app()) as session:
        webhook.session = session
        with capture_logs() as logs:
            for number in range(5):
                user = {"username": f"{number}\n" + "x" * 9000, "groups": ["all"]}
                assert (await webhook.ask(a_review(userInfo=user)))["allowed"] is False
    assert len(crowd._logged) == 3  # noqa: SLF001
    assert logs[0]["user"] == "0\\n" + "x" * 254


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        pytest.param(b"{}", 422, "request.uid", id="no-uid"),
        pytest.param(b" " * 20_001, 413, "20000 bytes", id="larger-than-limits.bodyBytes"),
    ],
)
async def test_what_has_no_uid_gets_an_error(
    webhook: Webhook, body: bytes, status: int, text: str
) -> None:
    """A review without a UID gets an HTTP error, so the webhook's failurePolicy decides."""
    code, problem = await webhook.send(body)
    assert (code, problem["status"]) == (status, status)
    assert text in problem["detail"]
    assert webhook.counted() == {}


async def test_nothing_else_is_served(webhook: Webhook) -> None:
    """The admission listener serves only reviews."""
    assert (await webhook.send(b"", method="GET"))[0] == 405
    for route in ROUTES:
        assert (await webhook.send(b"", method=route.method, path=route.path))[0] == 404


async def test_a_fault_of_ours_allows(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception is logged and the eviction is allowed."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(admission, "judge", fail)
    with capture_logs() as logs:
        assert await webhook.ask() == {"uid": REVIEW_UID, "allowed": True}
    assert [log["event"] for log in logs] == ["review_failed"]


async def test_while_the_process_ends(webhook: Webhook) -> None:
    """During shutdown reviews are answered and connections are closed."""
    webhook.api.service.closing = True
    body = json.dumps(a_review()).encode()
    async with webhook.session.post(PATH, data=body) as response:
        answer = await response.json()
        assert response.headers["Connection"] == "close"
    assert answer["response"]["allowed"] is False


@pytest.mark.parametrize(
    "reviews",
    [
        pytest.param(500, id="small"),
        pytest.param(10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
async def test_fuzzed_reviews(webhook: Webhook, prove: Callable[[str], None], reviews: int) -> None:
    """Randomly changed reviews never get a 5xx, and only the blocked eviction is denied."""
    rng = random.Random(17)
    turns = asyncio.Semaphore(20)
    tally = dict.fromkeys(("denied", "allowed", "error"), 0)

    async def send(body: bytes) -> None:
        async with turns:
            status, answer = await webhook.send(body)
        try:
            review = read_review(body)
        except NotAReview:
            tally["error"] += 1
            assert status in (413, 422)
            return
        if len(body) > 20_000:
            tally["error"] += 1
            assert status == 413
            return
        assert status == 200
        response = answer["response"]
        assert response["uid"] == review.uid
        tally["allowed" if response["allowed"] else "denied"] += 1
        held = review.is_eviction and (review.namespace, review.pod) == ("shop", a_pod().name)
        assert response["allowed"] is not (held and review.user in LISTED)

    async with asyncio.TaskGroup() as group:
        for _ in range(reviews):
            body = json.dumps(a_spoilt_review(rng)).encode()
            group.create_task(send(mutate(rng, body) if rng.random() < 0.4 else body))
    assert min(tally.values()) > reviews // 50
    prove(f"admission fuzz: {reviews} reviews, no 5xx, every answer as the rules say: {tally}")


def mutate(rng: random.Random, body: bytes) -> bytes:
    """A body in which bytes are changed, cut out or doubled, or whose end is missing."""
    line = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(line))
        match rng.randrange(4):
            case 0:
                line[at] = rng.randrange(256)
            case 1:
                del line[at : at + rng.randint(1, 30)]
            case 2:
                line[at:at] = line[at : at + rng.randint(1, 200)]
            case _:
                del line[max(1, at) :]
        line = line or bytearray(b"{")
    return bytes(line)
