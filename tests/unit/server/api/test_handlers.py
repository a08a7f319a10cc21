"""The API and other endpoints over real HTTP."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs
from yarl import URL

from exporter.app import build_service
from exporter.counters import Counters
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import (
    CLUSTER_RESOURCES,
    Checkpoint,
    KubeVirtSettings,
    Outcome,
    Resource,
    Vmi,
    Why,
    WhySource,
)
from exporter.engine.facts.policy import Policy, Reason
from exporter.health import Health, Watched
from exporter.kube.objects.kubevirt import parse_object
from exporter.kube.watch.feed import Feed
from exporter.metrics.counts import forget_old_counts
from exporter.server.api.evacuation_schemas import EvacuationsAnswer
from exporter.server.api.handlers import DIAGNOSED, SHARED_FROM, Service
from exporter.server.api.openapi import ROUTES, Route, write_openapi
from exporter.server.api.schemas import BlockedAnswer
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.server.http.access import Access
from exporter.server.http.answers import Repeatable
from exporter.server.http.problems import Refusal
from exporter.server.page.render import PAGE_HEADERS
from exporter.settings import Limits, Settings
from tests.cluster import PATIENCE
from tests.support.builders import (
    KEEP,
    NOW,
    UID,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
    an_evacuating_vmi,
    rfc3339,
)
from tests.support.hostile import HOSTILE, hostile_json
from tests.support.serving import serving
from tests.support.stores import ClockedStore
from tests.unit.kube.objects.test_reasons import objects


LIMITS = Limits(body_bytes=20_000, candidates=5)
VERDICTS, BLOCKED = "/v1/verdicts", "/v1/blocked"
CANDIDATE = {"namespace": "shop", "name": "db1"}
DOCUMENT = write_openapi()


@dataclass
class Clock:
    """A clock that a test sets. After `run` it advances by itself."""

    instant: float = NOW
    _began: float | None = None

    def __call__(self) -> float:
        """The current time."""
        if self._began is None:
            return self.instant
        return self.instant + asyncio.get_running_loop().time() - self._began

    def run(self) -> None:
        """Let the clock advance."""
        self._began = asyncio.get_running_loop().time()


@dataclass
class Answer:
    """One complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        """The detail of a problem."""
        return str(self.json["detail"])


def cooling(name: str, *, left: float = 300.0, **overrides: Any) -> Vmi:
    """A VMI whose cooldown of 15 minutes ends after `left` seconds."""
    end = NOW + left - 900.0
    fields = {"name": name, "uid": f"uid-of-{name}", **overrides}
    return a_vmi(migration=a_state(uid=f"m-of-{name}", start=end - 60.0, end=end), **fields)


def a_health(*watched: Watched, contact: float = NOW, synced: bool = True) -> Health:
    """The health of these watches; by default one per resource, with this last contact."""
    every = [
        Watched(resource, None, synced=synced, contact=contact) for resource in CLUSTER_RESOURCES
    ]
    return Health(180.0, 600.0, list(watched) or every)


@dataclass
class ServedApi:
    """A service over HTTP. Every answer is checked against the OpenAPI document."""

    policy: Policy = field(default_factory=a_policy)
    limits: Limits = LIMITS
    clock: Clock = field(default_factory=Clock)
    store: ClockedStore = field(default_factory=lambda: ClockedStore(keep=KEEP))
    counters: Counters = field(default_factory=Counters)
    health: Health = field(default_factory=a_health)
    session: aiohttp.ClientSession = field(init=False)
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.store.now = NOW
        self.service = build_service(
            Settings(policy=self.policy, limits=self.limits),
            self.store,
            self.health,
            counters=self.counters,
            events=None,
            clock=self.clock,
        )
        self.blocked, self.polls = self.service.blocked, self.service.polls

    def renew_contact(self) -> None:
        """Set the last contact of every watch to now."""
        for watched in self.health.watched:
            watched.contact = self.clock()

    def cool(self, name: str = "db1", **fields: Any) -> None:
        """Add a VMI that cools down; `fields` are those of `cooling`."""
        self.store.put(cooling(name, **fields))

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Send one request; returns the complete answer."""
        url = URL(path, encoded=True)
        async with self.session.request(method, url, **options) as response:
            answer = Answer(response.status, response.headers, await response.read())
        assert_declared(method, url.path, answer)
        return answer

    async def get(self, path: str, **headers: str) -> Answer:
        """Send a GET request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.ask("GET", path, headers=named)

    async def judge(self, *candidates: Mapping[str, object], **asked: object) -> Answer:
        """Ask for the verdicts on these candidates."""
        return await self.ask("POST", VERDICTS, json={"candidates": candidates, **asked})

    async def verdict(self, candidate: Mapping[str, object] = CANDIDATE, **asked: Any) -> Any:
        """Ask for the verdict on one candidate."""
        answer = await self.judge(candidate, **asked)
        assert answer.status == 200
        (verdict,) = answer.json["verdicts"]
        return verdict


class FakeAccess(Access):
    """Accepts only the token `good`, without asking an API server."""

    def __init__(self) -> None:
        pass

    async def check(
        self, authorization: str | None, method: str, path: str, *, peer: str = ""
    ) -> None:
        """Raises `Refusal` for every other token."""
        del method, path, peer
        if authorization != "Bearer good":
            raise Refusal(
                401, "Unauthenticated", "a token is needed", {"WWW-Authenticate": "Bearer"}
            )


def assert_declared(method: str, path: str, answer: Answer) -> None:
    """Check that the OpenAPI document declares this answer."""
    declared: dict[str, Any] = {}
    for template, operations in DOCUMENT["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            declared = operations.get("get" if method == "HEAD" else method.lower(), {})
    schema: dict[str, Any] = {"$ref": "#/components/schemas/Problem"}
    media = answer.headers.get("Content-Type", "").split(";")[0]
    if str(answer.status) in declared.get("responses", {}):
        response = declared["responses"][str(answer.status)]
        assert [name for name in response.get("headers", {}) if name not in answer.headers] == []
        content = response.get("content")
        if content is None:
            assert answer.body == b""
            return
        schema = content[media]["schema"]
    else:
        assert answer.status in (404, 405, 500)
        assert media == "application/problem+json"
    if method == "HEAD":
        assert answer.body == b""
    elif media.endswith("json"):
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        schema["components"] = DOCUMENT["components"]
        # Imported here, because it takes more than a second and every worker imports this module.
        import jsonschema as js  # type: ignore[import-untyped]  # noqa: PLC0415

        js.Draft202012Validator(schema, format_checker=js.FormatChecker()).validate(answer.json)
        if media == "application/problem+json":
            assert answer.json["status"] == answer.status


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve an application on a port; yields a client."""
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(app) as url, aiohttp.ClientSession(url, connector=connector) as session:
        yield session


@asynccontextmanager
async def opened(api: ServedApi) -> AsyncIterator[ServedApi]:
    """Serve the API as the query listener does."""
    async with served(make_query_app(api.service)) as session:
        api.session = session
        yield api


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    """A ready service over an empty store, on its own port."""
    async with opened(ServedApi()) as api:
        yield api


class TestVerdicts:
    """POST /v1/verdicts."""

    async def test_null_is_what_go_writes_for_nothing(self, api: ServedApi) -> None:
        """`candidates: null`, as Go clients encode an empty list, means no candidates."""
        answer = await api.ask("POST", VERDICTS, json={"candidates": None, "dryRun": None})
        assert (answer.status, answer.json["verdicts"]) == (200, [])

    async def test_answers_as_the_contract_says(self, api: ServedApi) -> None:
        """The answer about a VMI in cooldown has every field, also those that are null."""
        api.cool()
        api.store.put(an_ended_vmim(uid="m0", start=NOW - 5060.0, end=NOW - 5000.0))
        answer = await api.judge(CANDIDATE)

        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.json == {
            "asOf": "2027-01-15T08:00:00Z",
            "observedAt": "2027-01-15T08:00:00Z",
            "stale": False,
            "verdicts": [
                {
                    "namespace": "shop",
                    "name": "db1",
                    "known": True,
                    "mismatch": None,
                    "allowed": False,
                    "reason": "cooldown",
                    "notBefore": "2027-01-15T08:20:00Z",
                    "retryAfterSeconds": 1200.0,
                    "effectiveCooldownSeconds": 1800.0,
                    "migrationsInWindow": 2,
                    "evacuating": False,
                    "stuck": False,
                    "drain": "restarts",
                }
            ],
        }

    async def test_a_stuck_move_is_stuck_without_an_evacuation(self, api: ServedApi) -> None:
        """A migration that no eviction has asked for can be stuck; of a stopped VM nothing is."""
        runs = a_running_state(start=NOW - 8000.0)
        for name, phase in (("moves", "Running"), ("stopped", "Succeeded")):
            api.store.put(a_vmi(name=name, uid=name, migration=runs, phase=phase))
            api.store.put(a_vmim(vmi_name=name, name=name, uid=f"of-{name}", phase="Running"))
        answer = await api.judge(
            *({"namespace": "shop", "name": name} for name in ("moves", "stopped"))
        )

        fields = ("evacuating", "stuck", "drain")
        assert [[verdict[field] for field in fields] for verdict in answer.json["verdicts"]] == [
            [False, True, "restarts"],
            [False, False, None],
        ]

    async def test_answers_in_the_order_asked(self, api: ServedApi) -> None:
        """The verdicts have the order of the candidates; a repeated candidate has two verdicts."""
        api.cool("b")
        api.store.put(a_vmi(name="a", uid="a"))
        names = ["b", "nobody", "a", "b"]
        answer = await api.judge(*({"namespace": "shop", "name": name} for name in names))

        verdicts = answer.json["verdicts"]
        assert [verdict["name"] for verdict in verdicts] == names
        assert [verdict["allowed"] for verdict in verdicts] == [False, True, True, False]
        assert [verdict["known"] for verdict in verdicts] == [True, False, True, True]

    @pytest.mark.parametrize(
        ("candidate", "mismatch"),
        [
            (CANDIDATE | {"name": "nobody"}, "unknown"),
            (CANDIDATE | {"namespace": "other"}, "unknown"),
            (CANDIDATE | {"vmiUid": "another"}, "uid"),
        ],
    )
    async def test_allows_and_counts_what_is_not_ours(
        self, api: ServedApi, candidate: dict[str, str], mismatch: str
    ) -> None:
        """A VMI that is unknown or has another UID is allowed and counted as a mismatch."""
        api.cool()
        verdict = await api.verdict(candidate)

        assert verdict == {
            "namespace": candidate["namespace"],
            "name": candidate["name"],
            "known": False,
            "mismatch": mismatch,
            "allowed": True,
            "reason": None,
            "notBefore": None,
            "retryAfterSeconds": None,
            "effectiveCooldownSeconds": None,
            "migrationsInWindow": 0,
            "evacuating": False,
            "stuck": False,
            "drain": None,
        }
        assert api.counters.unknown_candidates == {mismatch: 1}
        assert not api.counters.blocks

    @pytest.mark.parametrize(
        "extra",
        [
            ({"vmiUid": UID}),
            {"vmiUid": None},
            {"vmiUid": ""},
            {"node": "", "pod": None},
            {"podUid": 7, "labels": {"a": [1]}},
        ],
    )
    async def test_knows_its_own(self, api: ServedApi, extra: dict[str, object]) -> None:
        """A VMI is found with its own UID or without a UID; unknown fields are ignored."""
        api.cool()
        answer = await api.judge(CANDIDATE | extra, comment={"x": 1})

        assert [verdict["reason"] for verdict in answer.json["verdicts"]] == ["cooldown"]

    async def test_counts_exactly_the_blocked_answers(self, api: ServedApi) -> None:
        """Each blocked verdict is counted by reason, node and namespace. The histogram also has
        each cooldown.
        """
        api.cool()
        api.store.put(a_vmi(name="runs", uid="r", node="n2", migration=a_running_state()))
        api.store.put(a_vmi(name="free", uid="f"))
        for _ in range(2):
            await api.judge(*(CANDIDATE | {"name": name} for name in ("db1", "runs", "free")))

        assert api.counters.blocks == {
            (Reason.COOLDOWN, "n1", "shop"): 2,
            (Reason.MIGRATION_IN_PROGRESS, "n2", "shop"): 2,
        }
        assert (api.counters.cooldowns.count, api.counters.cooldowns.total) == (2, 1800.0)

    async def test_counts_a_prevented_move_once_per_cooldown(self, api: ServedApi) -> None:
        """A VM that is asked for within its cooldown counts once, with the duration of its last
        migration, and again in its next cooldown, which may begin before the end of the present
        one. A corrected end, another node and a dry run count nothing.
        """
        prevented = api.counters.prevented
        first, second = a_state(), a_state(uid="m2", start=NOW - 150.0, end=NOW - 60.0)
        api.store.put(a_vmi(migration=first))
        await api.verdict(dryRun=True)
        assert not prevented.moves
        for node in ("n1", "n2"):
            api.store.put(a_vmi(node=node, migration=first))
            assert (await api.verdict())["reason"] == "cooldown"
        api.store.put(a_vmi(node="n2", migration=a_state(end=NOW - 590.0)))
        await api.verdict()
        assert (prevented.moves, prevented.migration_seconds) == ({"shop": 1}, {"shop": 60.0})

        api.store.put(a_vmi(migration=second))
        await api.verdict()
        assert (prevented.moves, prevented.migration_seconds) == ({"shop": 2}, {"shop": 150.0})
        assert api.counters.blocks.total() == 4

    async def test_counts_a_prevented_move_once_whatever_is_forgotten(self, api: ServedApi) -> None:
        """Only the cooldowns that have ended are forgotten."""
        api.store.put(a_vmi(migration=a_state()))
        for _ in range(2):
            await api.verdict()
            forget_old_counts(api.counters, api.store, NOW)
        assert api.counters.prevented.moves == {"shop": 1}

    async def test_what_is_not_a_cooldown_prevents_no_move(self, api: ServedApi) -> None:
        """A VM that is blocked because it migrates is moving already."""
        api.store.put(a_vmi(migration=a_running_state()))
        assert (await api.verdict())["reason"] == "migration_in_progress"
        assert not api.counters.prevented.moves

    async def test_a_failure_that_does_not_count_begins_no_cooldown(self) -> None:
        """With `countFailedMigrations: false` the move prevented is that of the last success."""
        api = ServedApi(policy=a_policy(count_failed_migrations=False))
        failed = a_state(uid="m2", end=NOW - 60.0, outcome=Outcome.FAILED)
        async with opened(api):
            for state in (a_state(), failed):
                api.store.put(a_vmi(migration=state))
                assert (await api.verdict())["reason"] == "cooldown"
        assert api.counters.prevented.moves == {"shop": 1}

    async def test_counts_each_verdict(self, api: ServedApi) -> None:
        """Each verdict is counted by checkpoint, and by whether the answer allows the eviction."""
        api.cool()
        for checkpoint in (None, Checkpoint.FILTER, Checkpoint.PRE_EVICTION):
            await api.judge(CANDIDATE, CANDIDATE | {"name": "nobody"}, checkpoint=checkpoint)
        assert api.counters.verdicts == {
            (None, False): 1,
            (None, True): 1,
            (Checkpoint.FILTER, False): 0,
            (Checkpoint.FILTER, True): 2,
            (Checkpoint.PRE_EVICTION, False): 1,
            (Checkpoint.PRE_EVICTION, True): 1,
        }

    async def test_counts_no_dry_run(self, api: ServedApi) -> None:
        """A dry run has the same answer. Dry runs and GET requests are not counted as blocks."""
        api.cool()
        wet = await api.verdict()
        verdicts = dict(api.counters.verdicts)
        counted = (dict(api.counters.blocks), api.counters.cooldowns.count)
        dry = await api.verdict(dryRun=True)
        await api.verdict(CANDIDATE | {"name": "nobody"}, dryRun=True)
        for path in (BLOCKED, "/v1/vmis/shop/db1", "/", "/metrics"):
            await api.get(path)

        assert dry == wet
        assert (dict(api.counters.blocks), api.counters.cooldowns.count) == counted
        assert not api.counters.unknown_candidates
        assert api.counters.verdicts == verdicts

    async def test_the_node_counted_is_the_cluster_s(self, api: ServedApi) -> None:
        """Metrics use the VMI's node in the cluster, not the node or pod of the request."""
        api.cool(node="n7")
        await api.verdict(CANDIDATE | {"node": "invented", "pod": "invented"})
        metrics = (await api.get("/metrics")).body.decode()

        assert (
            "descheduler_kubevirt_eviction_blocks_total"
            '{namespace="shop",node="n7",reason="cooldown"} 1.0'
        ) in metrics
        assert "invented" not in metrics

    @pytest.mark.parametrize(
        ("silence", "stale", "reasons"),
        [
            (179.9, False, ["migration_in_progress", "cooldown"]),
            (779.9, True, ["migration_in_progress", "cooldown"]),
            (780.0, True, [None, "cooldown"]),
        ],
    )
    async def test_dead_evidence_does_not_block(
        self,
        api: ServedApi,
        silence: float,
        stale: bool,
        reasons: list[str | None],
    ) -> None:
        """After 3 minutes without contact answers are stale; after 13 min only cooldowns block."""
        api.store.put(a_vmi(name="runs", uid="r", migration=a_running_state()))
        api.cool(left=890.0)
        api.clock.instant = NOW + silence
        answer = await api.judge(CANDIDATE | {"name": "runs"}, CANDIDATE)

        assert answer.json["stale"] is stale
        assert answer.json["observedAt"] == "2027-01-15T08:00:00Z"
        assert [verdict["reason"] for verdict in answer.json["verdicts"]] == reasons

    async def test_reads_the_body_whatever_its_type(self, api: ServedApi) -> None:
        """The body is read as JSON with any Content-Type."""
        body = json.dumps({"candidates": [CANDIDATE]}).encode()
        answer = await api.ask("POST", VERDICTS, data=body, headers={"Content-Type": "text/plain"})

        assert [verdict["known"] for verdict in answer.json["verdicts"]] == [False]


class TestRefusals:
    """Invalid requests get a problem that says what is wrong."""

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (b"", ""),
            (b"{", ""),
            (b"candidates: []", ""),
            (b'{"candidates": [], "x": ' + b"[" * 15_000, ""),
            (b'{"candidates": [{"name": "\\ud800"}]}', "it has a lone surrogate"),
            (b'{"candidates": [{"name": "\xed\xa0\x80"}]}', "it has a lone surrogate"),
            (b'{"candidates": [{"name": "\xff"}]}', "it has a byte that is not UTF-8"),
        ],
        ids=["empty", "cut", "yaml", "deep", "surrogate", "surrogate-in-utf-8", "not-utf-8"],
    )
    async def test_a_body_that_is_no_json_is_400(
        self, api: ServedApi, body: bytes, text: str
    ) -> None:
        """Invalid JSON is answered with 400; a lone surrogate or an invalid byte is named."""
        answer = await api.ask("POST", VERDICTS, data=body)

        assert answer.status == 400
        assert answer.detail.startswith("the body is not JSON: ")
        assert answer.detail.endswith(text)
        assert not answer.detail.endswith(":")

    @pytest.mark.parametrize(
        ("body", "named"),
        [
            ([], "Expected `object`, got `array`"),
            ({}, "candidates"),
            ({"candidates": {}}, "$.candidates"),
            ({"candidates": ["db1"]}, "$.candidates[0]"),
            ({"candidates": [{"name": "a"}]}, "`namespace`"),
            ({"candidates": [{"namespace": 5}]}, "Expected `string`, got `number`"),
            ({"candidates": [CANDIDATE, CANDIDATE | {"name": 7}]}, "$.candidates[1].name"),
            ({"candidates": [CANDIDATE | {"name": "a" * 254}]}, "$.candidates[0].name"),
            ({"candidates": [CANDIDATE | {"namespace": "a" * 64}]}, "$.candidates[0].namespace"),
            ({"candidates": [CANDIDATE | {"vmiUid": "a" * 129}]}, "$.candidates[0].vmiUid"),
            ({"candidates": [CANDIDATE | {"pod": "a" * 254}]}, "$.candidates[0].pod"),
            ({"candidates": [CANDIDATE | {"node": "a" * 254}]}, "$.candidates[0].node"),
            ({"candidates": [CANDIDATE] * 6}, "candidates: got 6, at most 5"),
            ({"candidates": [], "checkpoint": 1.5}, "Expected `string | null`, got `number`"),
            (
                {"candidates": [], "checkpoint": "PreEviction"},
                "at `$.checkpoint`: expected filter or preEviction",
            ),
            ({"candidates": [], "dryRun": "x"}, "Expected `boolean | null`, got `string`"),
        ],
    )
    async def test_a_wrong_field_is_422_and_named(
        self, api: ServedApi, body: object, named: str
    ) -> None:
        """The problem names the wrong field and uses JSON's type names; nothing is counted."""
        api.cool()
        answer = await api.ask("POST", VERDICTS, json=body)

        assert answer.status == 422
        assert named in answer.detail
        assert not api.counters.blocks

    async def test_a_body_too_large_is_413(self, api: ServedApi) -> None:
        """A body beyond the limit is answered with 413 and the limit."""
        answer = await api.ask("POST", VERDICTS, data=b" " * (LIMITS.body_bytes + 1))

        assert answer.status == 413
        assert "20000 bytes" in answer.detail
        assert "limits.bodyBytes" in answer.detail

    async def test_a_body_at_the_limits_is_read(self, api: ServedApi) -> None:
        """A request with exactly the maximum of bytes and of candidates is answered."""
        body = json.dumps({"candidates": [CANDIDATE] * LIMITS.candidates}).encode()
        answer = await api.ask("POST", VERDICTS, data=body.ljust(LIMITS.body_bytes))

        assert answer.status == 200
        assert len(answer.json["verdicts"]) == LIMITS.candidates

    @pytest.mark.parametrize(
        ("path", "named"),
        [
            ("/v1/blocked?checkpoint=both", "checkpoint"),
            ("/v1/blocked?checkpoint=", "checkpoint"),
            *((f"/v1/blocked?wait={value}", "wait") for value in ("61", "-0.1", "soon", "", "nan")),
            ("/v1/blocked?wait=inf", "wait"),
            *((f"/v1/vmis{query}", "name") for query in ("", "?name=", f"?name={'x' * 254}")),
            (f"/v1/vmis/{'a' * 64}/x", "namespace"),
            (f"/v1/vmis/a/{'x' * 254}", "name"),
            (f"/v1/nodes/{'n' * 254}", "node"),
        ],
    )
    async def test_a_wrong_parameter_is_422_and_named(
        self, api: ServedApi, path: str, named: str
    ) -> None:
        """An invalid parameter of the query or the path is answered with 422 and its name."""
        answer = await api.get(path)

        assert answer.status == 422
        assert answer.detail.startswith(f"{named}:")

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            *((f"/{path}", "/openapi.json") for path in ("nothing", "v1", "v1/blocked/", "%ff")),
            ("/v1/evacuation", "/openapi.json"),
            ("/v1/vmis/shop", "/openapi.json"),
            ("/v1/vmis/shop/nobody", "no VMI 'nobody' in namespace 'shop'"),
            ("/v1/vmis/other/db1", "no VMI"),
            ("/v1/vmis/shop/db1%2Fx", "no VMI"),
            ("/v1/vmis/shop/%ED%A0%80", "no VMI"),
            ("/v1/vmis/shop/%00%0a", "no VMI"),
            ("/v1/nodes/n9", "no VMI is on a node 'n9'"),
            ("/v1/nodes/n1%2F", "no VMI is on"),
            ("/v1/nodes/%00", "no VMI is on"),
        ],
    )
    async def test_what_does_not_exist_is_404(self, api: ServedApi, path: str, text: str) -> None:
        """An unknown path, an unknown VMI or a node without VMs is answered with 404."""
        api.cool()
        answer = await api.get(path)

        assert answer.status == 404
        assert text in answer.detail

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("GET", VERDICTS, {"POST"}),
            ("PUT", VERDICTS, {"POST"}),
            ("POST", BLOCKED, {"GET", "HEAD"}),
            ("DELETE", "/v1/vmis/shop/db1", {"GET", "HEAD"}),
            ("POST", "/metrics", {"GET", "HEAD"}),
        ],
    )
    async def test_a_wrong_method_is_405(
        self, api: ServedApi, method: str, path: str, allow: set[str]
    ) -> None:
        """A wrong method is answered with 405 and the allowed methods."""
        answer = await api.ask(method, path)

        assert answer.status == 405
        assert set(answer.headers["Allow"].split(",")) == allow

    async def test_a_fault_of_ours_is_500_without_its_text(self) -> None:
        """An exception is answered with 500; its text is only in the log."""

        async def fail(_accept: str) -> tuple[list[bytes], str]:
            raise RuntimeError("s3cret")

        api = ServedApi()
        api.service.render_metrics = fail
        async with opened(api):
            answer = await api.get("/metrics")

        assert answer.status == 500
        assert b"s3cret" not in answer.body
        assert "log" in answer.detail


class TestReadiness:
    """Requests before the first sync and during shutdown."""

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", VERDICTS),
            ("GET", BLOCKED),
            ("GET", "/v1/vmis?name=db1"),
            ("GET", "/v1/vmis/shop/db1"),
            ("GET", "/v1/evacuations"),
            ("GET", "/v1/nodes"),
            ("GET", "/v1/nodes/n1"),
            ("GET", "/readyz"),
        ],
    )
    @pytest.mark.parametrize("closing", [False, True], ids=["before-the-sync", "while-closing"])
    async def test_is_503_with_when_to_retry(
        self,
        api: ServedApi,
        method: str,
        path: str,
        closing: bool,
    ) -> None:
        """Before the first sync and during shutdown the answer is 503 with Retry-After
        and a reason.
        """
        api.service.closing = closing
        api.health.watched[0].synced = closing
        answer = await api.ask(method, path)

        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert ("shutting down" if closing else "virtualmachineinstances") in answer.detail

    async def test_the_status_is_not_ready_during_shutdown(self, api: ServedApi) -> None:
        """The status says that the exporter is ready until it is closed."""
        before = (await api.get("/v1/status")).json["ready"]
        api.service.close()

        assert (before, (await api.get("/v1/status")).json["ready"]) == (True, False)

    @pytest.mark.parametrize("path", ["/livez", "/metrics", "/", "/openapi.json"])
    async def test_the_rest_is_served_before_the_sync(self, api: ServedApi, path: str) -> None:
        """/livez, the metrics, the page and the OpenAPI document are served before the sync."""
        api.health.watched[0].synced = False
        api.health.watched[0].contact = None
        answer = await api.get(path)

        assert answer.status == 200


class TestBlocked:
    """GET /v1/blocked."""

    async def test_answers_as_the_contract_says(self, api: ServedApi) -> None:
        """The answer has one entry per VMI and blocking checkpoint, sorted, with its release."""
        api.cool("b")
        api.store.put(a_vmim(vmi_name="b"))
        api.store.put(a_vmi(name="a", uid="of-a", node="n2", evacuation_node="n2"))
        api.store.put(a_pod(vmi_uid="of-a", node="n2"))
        answer = await api.get(BLOCKED)

        shared = {"namespace": "shop", "name": "b", "vmiUid": "uid-of-b", "node": "n1"}
        assert answer.json == {
            "asOf": "2027-01-15T08:00:00Z",
            "stale": False,
            "maxAgeSeconds": 90.0,
            "blocked": [
                {
                    "namespace": "shop",
                    "name": "a",
                    "vmiUid": "of-a",
                    "node": "n2",
                    "checkpoint": "filter",
                    "reason": "evacuation_in_progress",
                    "notBefore": None,
                },
                shared
                | {
                    "checkpoint": "filter",
                    "reason": "migration_in_progress",
                    "notBefore": None,
                },
                shared
                | {
                    "checkpoint": "preEviction",
                    "reason": "cooldown",
                    "notBefore": "2027-01-15T08:05:00Z",
                },
            ],
        }

    @pytest.mark.parametrize("count", [0, 1, 200])
    async def test_is_written_as_it_would_be_in_one_piece(self, api: ServedApi, count: int) -> None:
        """The body is the same JSON, whether it is written in parts or at once."""
        for number in range(count):
            api.cool(f"db{number}")
        answer = await api.get(BLOCKED)
        read = msgspec.json.decode(answer.body, type=BlockedAnswer)

        assert len(read.blocked) == count
        assert answer.body == msgspec.json.encode(read)
        assert answer.headers["Content-Type"] == "application/json"
        assert int(answer.headers["Content-Length"]) == len(answer.body)
        assert (len(answer.body) > SHARED_FROM) is (count == 200)

    @pytest.mark.parametrize("checkpoint", ["filter", "preEviction"])
    async def test_one_checkpoint_has_only_its_entries(
        self, api: ServedApi, checkpoint: str
    ) -> None:
        """A query with a checkpoint lists only its entries, and has another ETag."""
        api.cool()
        api.store.put(a_vmim())
        both = await api.get(BLOCKED)
        answer = await api.get(f"{BLOCKED}?checkpoint={checkpoint}")

        assert len(both.json["blocked"]) == 2
        assert [entry["checkpoint"] for entry in answer.json["blocked"]] == [checkpoint]
        assert answer.headers["ETag"] != both.headers["ETag"]

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            ("{etag}", 304),
            ("W/{etag}", 304),
            ('"another"', 200),
            ('"another", {etag}', 304),
            ('"another",W/{etag},"x"', 304),
            ("*", 304),
            ("{bare}", 200),
            ("", 200),
        ],
    )
    async def test_if_none_match(self, api: ServedApi, header: str, status: int) -> None:
        """A client that sends the current ETag gets 304."""
        api.cool()
        etag = (await api.get(BLOCKED)).headers["ETag"]
        api.clock.instant += 60.0
        asked = header.format(etag=etag, bare=etag.strip('"'))
        answer = await api.get(BLOCKED, If_None_Match=asked)

        assert answer.status == status
        assert (answer.headers["ETag"], answer.headers["Cache-Control"]) == (etag, "no-cache")
        assert (answer.body == b"") is (status == 304)

    async def test_several_headers_are_one_list(self, api: ServedApi) -> None:
        """If a request has two If-None-Match headers, the ETags of both are compared."""
        etag = (await api.get(BLOCKED)).headers["ETag"]
        headers = [("If-None-Match", '"another"'), ("If-None-Match", etag)]
        answer = await api.ask("GET", BLOCKED, headers=headers)

        assert answer.status == 304

    @pytest.mark.parametrize(
        ("change", "is_current"),
        [
            pytest.param(lambda _: None, True, id="nothing"),
            pytest.param(lambda api: api.cool("db1", left=200.0), False, id="another-end"),
            pytest.param(lambda api: api.cool("db2"), False, id="another-vm"),
            pytest.param(
                lambda api: setattr(api.clock, "instant", NOW + 300.0),
                False,
                id="the-cooldown-is-over",
            ),
            pytest.param(lambda api: api.service.close(), False, id="a-shutdown"),
            pytest.param(
                lambda api: setattr(api.health.of(Resource.VMIS)[0], "synced", False),
                False,
                id="not-ready",
            ),
        ],
    )
    async def test_how_long_304_may_be_repeated(
        self, api: ServedApi, change: Callable[[ServedApi], None], *, is_current: bool
    ) -> None:
        """Until the set changes, or the exporter stops being ready; each repetition is counted."""
        api.cool()
        etag = (await api.get(BLOCKED)).headers["ETag"]
        request = make_mocked_request("GET", BLOCKED, headers={"If-None-Match": etag})
        answer = await api.service.answer_blocked(request)
        assert isinstance(answer, Repeatable)
        counted = api.counters.requests["blocked"].count
        change(api)

        assert answer.answer_again(b"") == (b"" if is_current else None)
        assert api.counters.requests["blocked"].count == counted + is_current


async def begin(api: ServedApi, etag: str) -> asyncio.Task[Answer]:
    """Begin a long poll with this ETag; returns when the exporter counts it as waiting."""
    waiting = asyncio.create_task(api.get(f"{BLOCKED}?wait=60", If_None_Match=etag))
    async with asyncio.timeout(PATIENCE):
        while not api.service.polls.waiting:  # noqa: ASYNC110 (there is no notification)
            await asyncio.sleep(0.005)
    return waiting


class TestLongPoll:
    """GET /v1/blocked?wait=."""

    async def test_a_change_of_the_store_answers(self, api: ServedApi) -> None:
        """A long poll is answered when a VMI becomes blocked."""
        etag = (await api.get(BLOCKED)).headers["ETag"]
        waiting = await begin(api, etag)
        api.cool()
        answer = await waiting

        assert answer.status == 200
        assert [entry["name"] for entry in answer.json["blocked"]] == ["db1"]
        assert answer.headers["ETag"] != etag

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            ({}, 200),
            ({"If_None_Match": '"another"'}, 200),
            ({"If_None_Match": "*"}, 304),
        ],
    )
    async def test_without_the_etag_the_answer_comes_at_once(
        self, api: ServedApi, header: dict[str, str], status: int
    ) -> None:
        """A long poll without the current ETag is answered at once."""
        async with asyncio.timeout(30):
            answer = await api.get(f"{BLOCKED}?wait=60", **header)

        assert answer.status == status

    async def test_a_disconnected_client_is_removed(self, api: ServedApi) -> None:
        """When a client disconnects, its long poll is removed."""
        waiting = await begin(api, (await api.get(BLOCKED)).headers["ETag"])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(PATIENCE):
            while api.service.polls.waiting:  # noqa: ASYNC110 (there is no notification)
                await asyncio.sleep(0.005)

        assert api.counters.requests["blocked_wait"].count == 1


class TestEvacuations:
    """GET /v1/evacuations, and the evacuation of one VMI."""

    async def test_one(self, api: ServedApi) -> None:
        """An evacuation has its diagnosis, its next step and the request that cancels it."""
        api.store.now = NOW
        api.store.put(an_evacuating_vmi(age=4000, evicted_by_descheduler=True))
        api.store.put(a_pod(eviction_in_progress=True))
        answer = await api.get("/v1/evacuations")
        (evacuation,) = answer.json["evacuations"]

        assert evacuation.pop("nextStep").startswith("Read the events of the VMIM")
        assert evacuation["cancel"].pop("command").endswith(" -f -")
        assert (
            evacuation["cancel"]
            .pop("needs")
            .startswith("Cancelling needs KubeVirt 1.7, and a role that may")
        )
        assert evacuation == {
            "namespace": "shop",
            "name": "db1",
            "vmiUid": UID,
            "node": "n1",
            "evacuationNodeName": "n1",
            "evictionStrategy": "LiveMigrate",
            "source": "descheduler",
            "requestedAt": rfc3339(NOW - 4000),
            "requestedBy": None,
            "ageSeconds": 4000.0,
            "state": "no_migration",
            "stuck": True,
            "stuckBy": ["age"],
            "lastSeen": None,
            "failedAttempts": 0,
            "backoff": None,
            "leftover": False,
            "diverged": False,
            "attempt": None,
            "mode": None,
            "requestedThrough": "eviction",
            "why": [],
            "cause": None,
            "command": "kubectl -n shop get events | sed -n -e /db1/p -e /virt-launcher-db1/p",
            "runbook": "KubeVirtEvacuationFailingRepeatedly#unexplained",
            "cancel": {
                "method": "PUT",
                "path": "/apis/subresources.kubevirt.io/v1/namespaces/shop"
                "/virtualmachineinstances/db1/evacuate/cancel",
                "body": {"evacuationNodeName": "n1"},
            },
        }
        again = await api.get("/v1/evacuations")
        explained = await api.get("/v1/vmis/shop/db1")
        assert explained.json["evacuation"] == again.json["evacuations"][0]

    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    async def test_hostile_texts_all_the_way(
        self, api: ServedApi, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Malicious texts from the cluster are cut, escaped in JSON and pages, and never logged."""
        feed = Feed(api.store, api.health.watched[0], api.clock)
        for resource, value in objects(text).items():
            feed.put(parse_object(resource, hostile_json(value)), None)
        answer = await api.get("/v1/evacuations")
        (evacuation,) = answer.json["evacuations"]

        assert 0 < len(evacuation["why"]) <= 8
        for why in evacuation["why"]:
            assert len(why["message"]) <= 1024
            assert f"{why['reason']}{why['message']}{evacuation['nextStep']}".isprintable()
        for path in ("/", "/vmis/shop/db1"):
            page = (await api.get(path)).body.decode()
            assert len(page) < 100_000
            assert all(c == "\n" or c.isprintable() for c in page)
            assert "<script>alert" not in page
        logged = capsys.readouterr().out
        assert not [word for word in ("xxxx", "alert", "png.exe", "rich") if word in logged]


class TestNodes:
    """GET /v1/nodes and GET /v1/nodes/{node}."""

    @pytest.fixture
    def drained(self, api: ServedApi) -> ServedApi:
        """n1 has an ended VM and a VM of each drain outcome except `fails`; n0 has one VM."""
        strategies: dict[str, dict[str, Any]] = {
            "leaves": {"eviction_strategy": "LiveMigrate", "migratable": True},
            "stays": {"eviction_strategy": "LiveMigrate"},
            "restarts": {"eviction_strategy": "None"},
            "external": {"eviction_strategy": "External"},
            "waits": {"migratable": True},
        }
        for name, fields in strategies.items():
            state = a_state(uid=f"m-{name}") if name == "leaves" else None
            api.store.put(a_vmi(name=name, uid=name, migration=state, **fields))
        stays = a_vmi(name="stays", uid="stays", **strategies["stays"])
        why = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable")
        api.store.put(stays, (why,))
        api.store.put(a_vmim(vmi_name="waits", name="of-waits", uid="of-waits"))
        api.store.put(a_vmi(name="alone", uid="alone", node="n0"))
        ended = a_state(uid="of-ended", start=NOW - 9000.0)
        movable = strategies["leaves"]
        api.store.put(
            a_vmi(name="ended", uid="ended", phase="Succeeded", migration=ended, **movable)
        )
        api.store.put(KubeVirtSettings(eviction_strategy="LiveMigrate"))
        return api

    async def test_answers_as_the_contract_says(self, drained: ServedApi) -> None:
        """The answer has every field of each node, and is sorted by node."""
        answer = await drained.get("/v1/nodes")

        n0: dict[str, object] = {
            **dict.fromkeys(DrainOutcome, 0),
            "node": "n0",
            "vmis": 1,
            "stays": 1,
            "canBeEmptied": False,
            "dependsOnOthers": False,
            "atLeastSeconds": None,
            "schedulable": True,
            "cordonedAt": None,
            "outlivedPods": 0,
            "conditions": [],
            "drain": None,
        }
        n1 = dict.fromkeys(set(DrainOutcome) - {DrainOutcome.FAILS, DrainOutcome.ENDS}, 1)
        assert answer.json == {
            "asOf": "2027-01-15T08:00:00Z",
            "stale": False,
            "nodes": [n0, n0 | n1 | {"node": "n1", "vmis": 5, "dependsOnOthers": True}],
        }

    async def test_a_drain_takes_as_long_as_the_longest_move(self, api: ServedApi) -> None:
        """What is known of the moves of a node's VMs bounds its drain; stopped VMs do not count."""
        api.store.put(KubeVirtSettings(eviction_strategy="LiveMigrate"))
        lasted = {"short": (60.0, "Running"), "long": (120.0, "Running"), "over": (9e3, "Failed")}
        for name, (seconds, phase) in lasted.items():
            state = a_state(uid=f"m-{name}", start=NOW - 5000.0 - seconds, end=NOW - 5000.0)
            vmi = a_vmi(name=name, uid=name, migration=state, migratable=True, phase=phase)
            api.store.put(vmi)
        api.store.put(a_vmi(name="new", uid="new", migratable=True))
        (node,) = (await api.get("/v1/nodes")).json["nodes"]
        assert (node["vmis"], node["atLeastSeconds"]) == (3, 120.0)

    async def test_one_node_has_its_candidates(self, drained: ServedApi) -> None:
        """The answer about one node has its counts and each of its VMs."""
        (_, listed) = (await drained.get("/v1/nodes")).json["nodes"]
        drain = (await drained.get("/v1/nodes/n1")).json
        candidates = drain.pop("candidates")
        assert drain.pop("outlived") == []

        assert drain == listed | {"asOf": "2027-01-15T08:00:00Z", "stale": False}
        assert [vm["name"] for vm in candidates] == sorted(vm["name"] for vm in candidates)
        assert all(vm["outcome"] == vm["name"] for vm in candidates)
        assert candidates[1] == {
            "namespace": "shop",
            "name": "leaves",
            "outcome": "leaves",
            "reason": "is migrated",
            "why": [],
            "cause": None,
            "failedAttempts": 0,
            "lastDurationSeconds": 60.0,
            "state": None,
            "nextStep": None,
            "command": None,
            "runbook": None,
        }
        (why,) = candidates[3]["why"]
        assert why == {
            "source": "LiveMigratable",
            "reason": "DisksNotLiveMigratable",
            "message": "",
            "at": None,
        }


def path_of(route: Route) -> str:
    """The path of a route, for db1 and its node."""
    asked = "?name=db1" if route.name == "vmis" else ""
    names = {"namespace": "shop", "name": "db1", "node": "n1", "runbook": "KubeVirtVMChurning"}
    return route.path.format_map(names) + asked


class TestListeners:
    """Which routes each listener serves."""

    @pytest.mark.parametrize("route", ROUTES, ids=lambda route: str(route.name))
    @pytest.mark.parametrize("listener", ["query", "metrics"])
    async def test_serves_its_routes(self, listener: str, route: Route) -> None:
        """Both serve the metrics, probes, page and runbooks; the query listener also the rest."""
        api = ServedApi()
        api.cool()
        make = make_query_app if listener == "query" else make_metrics_app
        path = path_of(route)
        async with served(make(api.service)) as api.session:
            answer = await api.ask(
                route.method, path, json={"candidates": []} if route.method == "POST" else None
            )

        both = {"metrics", "livez", "readyz", "page", "runbooks", "runbook"}
        shown = listener == "query" or route.name in both
        assert (answer.status == 200) is shown
        assert shown or answer.status == 404

    @pytest.mark.parametrize("route", [route for route in ROUTES if route.method == "GET"], ids=str)
    async def test_answers_head(self, api: ServedApi, route: Route) -> None:
        """The answer to HEAD has the headers of GET and no body."""
        api.cool()
        answer = await api.ask("HEAD", path_of(route))

        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 0


class TestOthers:
    """The OpenAPI document, the page and the metrics."""

    async def test_the_document_is_the_one_generated(self, api: ServedApi) -> None:
        """/openapi.json is the generated document."""
        assert (await api.get("/openapi.json")).json == DOCUMENT

    @pytest.mark.parametrize(
        ("name", "namespaces"), [("db1", ["bank", "shop"]), ("nobody", []), ("%ED%A0%80", [])]
    )
    async def test_a_name_has_its_namespaces(
        self, api: ServedApi, name: str, namespaces: list[str]
    ) -> None:
        """/v1/vmis lists the namespaces that have a VMI of the name, also if it has no node."""
        api.cool()
        api.store.put(a_vmi(name="db1", uid="9", namespace="bank", node=""))

        assert (await api.get(f"/v1/vmis?name={name}")).json == {"namespaces": namespaces}

    async def test_the_page_is_guarded_by_its_headers(self, api: ServedApi) -> None:
        """The page has its Content-Security-Policy and the other security headers."""
        answer = await api.ask("HEAD", "/")

        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert {name: answer.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS

    async def test_the_page_takes_a_filter(self, api: ServedApi) -> None:
        """The query filters the page. The page names an invalid value, with status 200."""
        api.cool()
        answer = await api.get("/?namespace=bank&sort=nonsense")

        assert answer.status == 200
        assert "None of 1 matches." in answer.body.decode()
        assert "sort: expected time or name or node or state" in answer.body.decode()

    @pytest.mark.parametrize("page", [False, True])
    async def test_the_open_page_names_nobody(self, page: bool) -> None:
        """Without authentication the metrics listener's page has no VM names by default."""
        api = ServedApi()
        api.cool()
        async with served(make_metrics_app(api.service, page=page)) as api.session:
            body = (await api.get("/")).body.decode()
            single = await api.get("/vmis/shop/db1")

        assert ('data-name="db1"' in body) is page
        assert ("db1" in body) is page
        assert ("listen.page: true" in body) is not page
        assert single.status == (200 if page else 404)
        assert (b'data-field="reason"' in single.body) is page
        assert "/v1/" not in body
        assert b"/v1/" not in single.body

    async def test_with_authentication_the_page_has_names(self) -> None:
        """With authentication the metrics listener's page has VM names."""
        api = ServedApi()
        api.cool()
        async with served(make_metrics_app(api.service, FakeAccess())) as api.session:
            for path in ("/", "/vmis/shop/db1"):
                answer = await api.get(path, Authorization="Bearer good")
                refused = await api.get(path)

                assert "db1" in answer.body.decode()
                assert refused.status == 401
                assert b"db1" not in refused.body

    async def test_metrics_are_negotiated(self, api: ServedApi) -> None:
        """A scraper gets the format that it accepts."""
        plain = await api.get("/metrics")
        prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5"
        answer = await api.get("/metrics", Accept=f"{prometheus},text/plain;version=0.0.4;q=0.3")

        assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["Content-Type"] == (
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
        )

    async def test_every_endpoint_is_timed_from_the_start(self, api: ServedApi) -> None:
        """Each endpoint has a duration histogram before its first request."""
        before = {name: histogram.count for name, histogram in api.counters.requests.items()}
        await api.get("/livez")
        await api.judge()
        await api.get(f"{BLOCKED}?wait=0")

        assert before == dict.fromkeys([*(route.name for route in ROUTES), "blocked_wait"], 0)
        assert api.counters.requests["livez"].count == 1
        assert api.counters.requests["verdicts"].count == 1
        assert api.counters.requests["blocked_wait"].count == 1

    async def test_a_block_is_logged_once_a_minute(self, api: ServedApi) -> None:
        """The same block of a VMI is logged at most once a minute."""
        api.cool(left=890.0)
        with capture_logs() as logs:
            for passed in (0.0, 30.0, 59.0, 61.0):
                api.clock.instant = NOW + passed
                await api.verdict(CANDIDATE | {"pod": "p1"})
                await api.verdict(dryRun=True)

        assert [line["event"] for line in logs] == ["eviction_blocked"] * 2
        assert {line["pod"] for line in logs} == {"p1"}


async def test_an_answer_about_all_vms_is_of_one_instant() -> None:
    """Other tasks run while all VMs are described; their changes are in the next answer."""
    api = ServedApi()
    service, vmis = api.service, 3 * DIAGNOSED
    for number in range(vmis):
        api.store.put(
            an_evacuating_vmi(age=60.0, name=f"db{number}", uid=f"{number}", evacuation_node="n1")
        )
    snapshot = await service.take_snapshot()

    async def describe() -> tuple[EvacuationsAnswer, dict[str, Counter[DrainOutcome]]]:
        evacuations = await service.describe_evacuations(snapshot)
        return evacuations, (await service.count_outcomes(snapshot)).counts

    quiet, turns = await describe(), 0

    async def change() -> None:
        nonlocal turns
        for number in range(vmis):
            api.store.put(a_vmi(name=f"db{number}", uid=f"{number}", node="n2"))
            turns += 1
            await asyncio.sleep(0)

    changing = asyncio.create_task(change())
    assert await describe() == quiet
    changing.cancel()
    assert turns >= 2 * vmis // DIAGNOSED
    assert len(quiet[0].evacuations) == sum(quiet[1]["n1"].values()) == vmis
    later = await service.describe_evacuations(await service.take_snapshot())
    assert len(later.evacuations) == vmis - turns
