"""The admission webhook as a real kube-apiserver calls it: denials, faults, latency, load."""

import asyncio
import json
import os
import random
import re
import signal
import ssl
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeAlias

import aiohttp
import pytest

from exporter.counters import ReviewOutcome
from tests.cluster import PODS, RealCluster, poll
from tests.cluster.eviction_requests import SERVED, build_request
from tests.cluster.processes import freeze
from tests.cluster.resources import EVICTION_REQUESTS
from tests.cluster.users import kubeconfig
from tests.cluster.versions import RUNNING, is_kubernetes_at_least
from tests.support.admission import (
    PATH,
    TIMEOUT,
    Evictor,
    Pair,
    add_vm,
    admitting,
    configuration,
    make_pair,
    registered,
    versions,
)
from tests.support.api_servers import RealStage
from tests.support.program import Program, program
from tests.support.relay import Gate
from tests.support.reviews import a_review


Prove: TypeAlias = Callable[[str], None]

WEBHOOK = "evictions.kubevirt-eviction-exporter.io"
REVIEWS = "kubevirt_eviction_exporter_admission_reviews_total"
FAILED_OPEN = "apiserver_admission_webhook_fail_open_count"
REJECTED = "kubevirt_eviction_exporter_rejected_requests_total"
SOAK = pytest.mark.soak
MIB = 2**20
CONNECTIONS = 25
"""The number of connections that client-go keeps open to one webhook."""
SLACK = 0.2
"""Seconds that an eviction may take beyond the webhook's timeout."""
_numbers = count(1)


@dataclass
class Ground:
    """A namespace with a blocked and an allowed VM, and a listed and an unlisted evictor."""

    real: RealStage
    folder: Path
    pair: Pair
    namespace: str
    listed: Evictor
    other: Evictor
    held: str
    free: str

    @asynccontextmanager
    async def exporter(
        self,
        mode: str = "enforce",
        *,
        url: str | None = None,
        pair: Pair | None = None,
        max_hold: str = "24h",
    ) -> AsyncIterator[Program]:
        """Run an exporter that judges the listed evictor's evictions; it may not be ready yet."""
        cluster = self.real.cluster
        file = self.folder / f"exporter-{next(_numbers)}.kubeconfig"
        login = kubeconfig(file, url or cluster.api.url, cluster.exporter)
        config = admitting(pair or self.pair, mode, self.listed.user.name)
        config["kube"] = {"syncTimeout": "10m"}
        config["admission"]["maxHold"] = max_hold
        arguments = ("--kubeconfig", str(login))
        async with program(self.folder, *arguments, config=config) as running:
            await running.listening()
            yield running

    @asynccontextmanager
    async def called(self, exporter: Program, authority: Path | None = None) -> AsyncIterator[None]:
        """Register an exporter's webhook at the API server."""
        webhook = configuration(
            exporter.admission, authority or self.pair.authority, [self.listed.user.name]
        )
        async with registered(self.real.cluster, webhook):
            yield

    @asynccontextmanager
    async def held_back(self, mode: str = "enforce", **options: Any) -> AsyncIterator[Program]:
        """A ready exporter whose webhook the API server calls."""
        async with self.exporter(mode, **options) as exporter, self.called(exporter):
            await exporter.ready()
            await exporter.until_verdict(self.namespace, "held", "preEviction", "cooldown")
            await self.listed.until_called(exporter, self.free)
            yield exporter

    async def failed_open(self) -> float:
        """How often the API server let an eviction pass because our webhook failed."""
        text = (await self.real.admin.send("GET", "/metrics")).decode()
        lines = [line for line in text.splitlines() if line.startswith(FAILED_OPEN)]
        return sum(float(line.rpartition(" ")[2]) for line in lines if WEBHOOK in line)


@pytest.fixture(scope="module")
async def ground(
    real: RealStage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    """Two VMs on the real API server."""
    async with grounded(real, tmp_path_factory.mktemp("admission")) as made:
        yield made


@asynccontextmanager
async def grounded(real: RealStage, folder: Path) -> AsyncIterator[Ground]:
    """Two VMs on an API server."""
    namespace = await real.make_namespace()
    async with AsyncExitStack() as stack:
        listed, other = [
            await stack.enter_async_context(
                Evictor.made(real.cluster, f"{namespace}-{name}", namespace)
            )
            for name in ("listed", "other")
        ]
        pods = [
            await add_vm(real.admin, namespace, name, held=name == "held")
            for name in ("held", "free")
        ]
        pair = make_pair(folder / "pair")
        yield Ground(real, folder, pair, namespace, listed, other, *pods)


@pytest.mark.skipif(
    not is_kubernetes_at_least("1.37"),
    reason=f"Kubernetes {RUNNING['kube-apiserver']}: no EvictionRequest",
)
async def test_an_eviction_request_is_judged_by_its_last_responder(tmp_path: Path) -> None:
    """The webhook reviews the eviction that follows an EvictionRequest, not the request itself.

    Kubernetes 1.37.2 has the API but no controller yet, so the test sends the eviction itself.
    """
    async with RealCluster(tmp_path, flags=SERVED) as cluster:
        real = RealStage(cluster)
        async with grounded(real, tmp_path) as ground, ground.held_back() as exporter:
            before = await exporter.sample(REVIEWS)
            pod = await real.admin.get(PODS, ground.namespace, ground.held)
            await real.admin.create(EVICTION_REQUESTS, build_request(pod, "example.com/drain"))
            assert await exporter.sample(REVIEWS) == before
            answer = await ground.listed.evict(ground.held)
            assert answer.code == 429
            assert await exporter.sample(REVIEWS, outcome="denied") == 1
            assert (await ground.other.evict(ground.held)).code == 201
            assert await exporter.sample(REVIEWS, outcome="denied") == 1


async def test_a_denial_changes_nothing(ground: Ground) -> None:
    """A denial is a 429 with our message, without Retry-After, and changes no object."""
    before = await versions(ground.real.admin, ground.namespace)
    async with ground.held_back() as exporter:
        answer = await ground.listed.evict(ground.held)
        denied = await exporter.sample(REVIEWS, outcome="denied")
    assert (answer.code, answer.body["reason"]) == (429, "TooManyRequests")
    assert re.fullmatch(
        f'admission webhook "{WEBHOOK}" denied the request: kubevirt-eviction-exporter: VMI'
        rf" {ground.namespace}/held: cooldown until [\d:]{{8}}Z \(in 1\dm(\d+s)?\),"
        " after 1 migration in 24h",
        answer.message,
    )
    assert "Retry-After" not in answer.headers
    assert "retryAfterSeconds" not in json.dumps(answer.body)
    assert "Eviction triggered evacuation" not in answer.message
    assert denied == 1
    assert await versions(ground.real.admin, ground.namespace) == before


async def test_only_listed_users_are_held(ground: Ground) -> None:
    """Another user's eviction passes without a call of the webhook."""
    async with ground.held_back() as exporter:
        assert (await ground.other.evict(ground.held, dry_run=True)).code == 201
        assert (await ground.listed.evict(ground.held, dry_run=True)).code == 429
        assert (await ground.listed.evict(ground.free, dry_run=True)).code == 201
        assert await exporter.sample(REVIEWS, outcome="unlisted_user") == 0


@pytest.mark.parametrize("query", [False, True], ids=["of-the-eviction", "of-the-request"])
async def test_dry_runs_are_not_counted(ground: Ground, query: bool) -> None:
    """Both forms of a dry run get a verdict, and no metric counts them."""
    async with ground.held_back() as exporter:
        before = await exporter.sample(REVIEWS)
        answer = await ground.listed.evict(ground.held, dry_run=not query, query=query)
        assert answer.code == 429
        assert await exporter.sample(REVIEWS) == before


async def test_warnings_reach_the_evictor(ground: Ground) -> None:
    """In mode `warn` the eviction passes, and its answer has our warning."""
    async with ground.held_back("warn"):
        answer = await ground.listed.evict(ground.held, dry_run=True)
    assert answer.code == 201
    assert "kubevirt-eviction-exporter would deny this eviction: VMI" in answer.headers["Warning"]


async def test_what_a_peer_without_credentials_can_do(ground: Ground) -> None:
    """Reviews that anyone sends directly to the webhook have only the effects that SECURITY.md
    names.
    """
    admin, namespace = ground.real.admin, ground.namespace
    pod = await add_vm(admin, namespace, "forged", held=True)
    user = {"username": ground.listed.user.name}
    before = await versions(admin, namespace)
    trust = ssl.create_default_context(cafile=ground.pair.authority)
    async with (
        ground.held_back(max_hold="2s") as exporter,
        aiohttp.ClientSession(
            exporter.admission, connector=aiohttp.TCPConnector(ssl=trust)
        ) as session,
    ):
        await exporter.until_verdict(namespace, "forged", "preEviction", "cooldown")

        async def send(body: bytes) -> tuple[int, Any]:
            async with session.post(PATH, data=body) as response:
                return response.status, await response.json(content_type=None)

        async def forge(**request: Any) -> Any:
            review = a_review(**{"namespace": namespace, "name": pod, "userInfo": user, **request})
            status, answer = await send(json.dumps(review).encode())
            assert status == 200
            return answer["response"]

        async def count_calls() -> float:
            """Count the reviews that resolve our alert with the cause `not_called`."""
            outcomes = set(ReviewOutcome) - {ReviewOutcome.UNLISTED_USER}
            return sum([await exporter.sample(REVIEWS, outcome=outcome) for outcome in outcomes])

        quiet = await count_calls()
        assert (await forge(userInfo={"username": "somebody"}))["allowed"]
        assert (await forge(subResource="exec"))["allowed"]
        assert [(await send(body))[0] for body in (b"", b"{}", b"[" * 9000)] == [422] * 3
        assert await count_calls() == quiet

        assert (await forge(name="virt-launcher-none"))["allowed"]
        assert await count_calls() == quiet + 1
        told = await forge()
        assert f"VMI {namespace}/forged: cooldown until" in told["status"]["message"]
        _, shown = await exporter.get(f"/v1/vmis/{namespace}/forged")
        assert [eviction["user"] for eviction in shown["blockedEvictions"]] == [user["username"]]
        assert '"event": "eviction_denied"' in exporter.output
        assert await exporter.sample(REVIEWS, outcome="denied") == 1
        assert await versions(admin, namespace) == before
        assert (await ground.other.evict(pod, dry_run=True)).code == 201
        assert (await ground.listed.evict(pod, dry_run=True)).code == 429

        async def is_let_go() -> bool:
            return bool((await forge())["allowed"])

        await poll(is_let_go, what="an allowed eviction after the forged reviews")
        assert (await ground.listed.evict(pod, dry_run=True)).code == 201
        async with session.get("/metrics") as response:
            assert response.status == 404


async def test_each_fault_lets_evictions_pass(ground: Ground, prove: Prove) -> None:
    """Whatever fault the webhook has, evictions pass within its timeout.

    The API server counts each failed call, and our alert reads that count. An exporter that is not
    ready allows the eviction, and counts the outcome `unavailable`.
    """
    rows = []
    stranger = make_pair(ground.folder / "stranger")

    async def pass_by(fault: str, *, fails: bool) -> None:
        name = f"by-{next(_numbers)}"
        pod = await add_vm(ground.real.admin, ground.namespace, name, held=True)
        before = await ground.failed_open()
        answer = await ground.listed.evict(pod)
        failed = await ground.failed_open() - before
        assert answer.code == 201, answer.message
        assert answer.seconds <= TIMEOUT + SLACK
        assert failed == (1 if fails else 0)
        rows.append(f"  {fault:18} {answer.seconds * 1000:>8.0f} ms {failed:>14.0f}")

    async with ground.held_back() as exporter:
        freeze(exporter.process.pid)
        try:
            await pass_by("frozen", fails=True)
        finally:
            exporter.process.send_signal(signal.SIGCONT)
        exporter.process.kill()
        await exporter.process.wait()
        await pass_by("killed", fails=True)
    async with ground.exporter(pair=stranger) as exporter, ground.called(exporter):
        await _until_failing(ground)
        await pass_by("wrong certificate", fails=True)
    async with ground.exporter() as exporter, ground.called(exporter, stranger.authority):
        await _until_failing(ground)
        await pass_by("wrong caBundle", fails=True)
    async with Gate(ground.real.url) as gate:
        gate.stall()
        async with ground.exporter(url=gate.url) as exporter, ground.called(exporter):
            await ground.listed.until_called(exporter, ground.free)
            await pass_by("not ready", fails=False)
            assert await exporter.sample(REVIEWS, outcome="unavailable") == 1
            exporter.process.kill()
    prove("admission faults: each eviction passes; its time, what the API server counts")
    for row in rows:
        prove(row)


async def _until_failing(ground: Ground) -> None:
    """Wait until the API server counts a failed call of the broken webhook."""
    before = await ground.failed_open()

    async def is_failing() -> bool:
        await ground.listed.evict(ground.free, dry_run=True)
        return await ground.failed_open() > before

    await poll(is_failing, within=20, what="the webhook failing")


@pytest.mark.parametrize(
    "evictions", [pytest.param(60, id="small"), pytest.param(1000, id="soak", marks=SOAK)]
)
async def test_latency(ground: Ground, prove: Prove, evictions: int) -> None:
    """The webhook adds less than 30 ms to the median eviction that it allows or denies.

    The limit is loose, because the machine is shared; the printed table has the numbers.
    """
    columns: dict[str, list[float]] = {"no webhook": []}
    for _ in range(evictions):
        answer = await ground.listed.evict(ground.free, dry_run=True)
        columns["no webhook"].append(answer.seconds)
    kinds = {
        "unlisted user": (ground.other, ground.free, 201),
        "allowed": (ground.listed, ground.free, 201),
        "denied": (ground.listed, ground.held, 429),
    }
    async with ground.held_back():
        for _ in range(evictions):
            for name, (evictor, pod, code) in kinds.items():
                answer = await evictor.evict(pod, dry_run=True)
                assert answer.code == code
                columns.setdefault(name, []).append(answer.seconds)
    prove(f"admission latency: {evictions} evictions each, ms: p50, p99")
    p50 = {}
    for name, seconds in columns.items():
        cuts = statistics.quantiles(seconds, n=100)
        p50[name] = cuts[49]
        prove(f"  {name:14} {cuts[49] * 1000:>7.2f} {cuts[98] * 1000:>7.2f}")
    assert p50["denied"] - p50["unlisted user"] < 0.03
    assert p50["allowed"] - p50["unlisted user"] < 0.03


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        pytest.param(200, 3, id="small"),
        pytest.param(1000, 60, id="soak", marks=[SOAK, pytest.mark.timeout(300)]),
    ],
)
async def test_many_reviews(ground: Ground, prove: Prove, rate: int, seconds: int) -> None:
    """With many reviews a second on one core, no review fails and memory does not grow."""
    async with ground.exporter() as exporter:
        await exporter.ready()
        await exporter.until_verdict(ground.namespace, "held", "preEviction", "cooldown")
        os.sched_setaffinity(exporter.process.pid, {0})
        user = {"username": ground.listed.user.name}
        reviews = [
            json.dumps(a_review(namespace=ground.namespace, name=pod, userInfo=user)).encode()
            for pod in (ground.held, ground.free)
        ]
        trust = ssl.create_default_context(cafile=ground.pair.authority)
        connector = aiohttp.TCPConnector(ssl=trust, limit=CONNECTIONS)
        taken: list[float] = []
        answers: Counter[bool] = Counter()
        async with aiohttp.ClientSession(exporter.admission, connector=connector) as session:

            async def ask(body: bytes) -> None:
                began = time.perf_counter()
                async with session.post(PATH, data=body) as response:
                    assert response.status == 200
                    answers[(await response.json())["response"]["allowed"]] += 1
                taken.append(time.perf_counter() - began)

            await ask(reviews[0])
            before = exporter.resident() // MIB
            refused = await exporter.sample(REJECTED)
            began = time.perf_counter()
            numbers = iter(range(rate * seconds))

            async def keep_asking() -> None:
                for number in numbers:
                    if (ahead := began + number / rate - time.perf_counter()) > 0:
                        await asyncio.sleep(ahead)
                    await ask(reviews[number % 2])

            async with asyncio.TaskGroup() as group:
                for _ in range(CONNECTIONS):
                    group.create_task(keep_asking())
            lasted = time.perf_counter() - began
        after = exporter.resident() // MIB
        assert await exporter.sample(REVIEWS) == rate * seconds + 1
        assert await exporter.sample(REJECTED) == refused
    assert answers == {False: rate * seconds // 2 + 1, True: rate * seconds // 2}
    assert after < before + 30
    cuts = statistics.quantiles(taken, n=100)
    prove(
        f"admission load: {rate * seconds} reviews in {lasted:.1f} s"
        f" ({rate * seconds / lasted:.0f}/s) on one core, none failed; p50"
        f" {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms; memory {before} MiB before,"
        f" {after} MiB after"
    )


class Service:
    """Forwards like kube-proxy: each connection goes to one ready endpoint and stays there."""

    def __init__(self) -> None:
        self.endpoints: list[int] = []
        self._relays: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            port = random.choice(self.endpoints)
            other, onward = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, onward), _copy(other, writer))
        except OSError:
            pass
        finally:
            writer.close()
            self._relays.discard(task)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()


@pytest.mark.parametrize(
    ("rate", "replaced"),
    [
        pytest.param(20, 1, id="small"),
        pytest.param(50, 2, id="soak", marks=[SOAK, pytest.mark.timeout(300)]),
    ],
)
async def test_a_rolling_restart(ground: Ground, prove: Prove, rate: int, replaced: int) -> None:
    """During a rolling restart each eviction is answered in time and correctly.

    As in the Deployment, a new replica is ready before an old one leaves the Service. The old
    replica runs its `preStop` before it gets SIGTERM.
    """
    answers: list[tuple[str, int, float]] = []
    over = asyncio.Event()
    async with AsyncExitStack() as stack, Service() as service:

        async def start() -> Program:
            replica = await stack.enter_async_context(ground.exporter())
            await replica.ready()
            await replica.until_verdict(ground.namespace, "held", "preEviction", "cooldown")
            service.endpoints.append(_port(replica))
            return replica

        replicas = [await start(), await start()]
        webhook = configuration(service.url, ground.pair.authority, [ground.listed.user.name])
        await stack.enter_async_context(registered(ground.real.cluster, webhook))

        async def is_held() -> bool:
            return (await ground.listed.evict(ground.held, dry_run=True)).code == 429

        await poll(is_held, within=20, what="the webhook called")

        async def evict(kind: str, pod: str) -> None:
            answer = await ground.listed.evict(pod, dry_run=True)
            answers.append((kind, answer.code, answer.seconds))

        async def keep_evicting() -> None:
            async with asyncio.TaskGroup() as group:
                for number in count():
                    if over.is_set():
                        return
                    kind = "free" if number % 2 else "held"
                    group.create_task(evict(kind, getattr(ground, kind)))
                    await asyncio.sleep(1 / rate)

        failed_open = await ground.failed_open()
        began = time.perf_counter()
        evicting = asyncio.create_task(keep_evicting())
        for old in replicas[:replaced]:
            await start()
            service.endpoints.remove(_port(old))
            await asyncio.sleep(2)  # preStop
            assert await old.end() == 0
        over.set()
        await evicting
        lasted = time.perf_counter() - began
    failed_open = await ground.failed_open() - failed_open
    wrong = [answer for answer in answers if answer[:2] not in {("held", 429), ("free", 201)}]
    slowest = max(seconds for _, _, seconds in answers)
    prove(
        f"admission rollout: {replaced} replicas replaced under {len(answers) / lasted:.0f}"
        f" evictions a second: {len(answers)} evictions, {len(wrong)} with a wrong answer,"
        f" {failed_open:g} without an answer in time, the slowest took"
        f" {slowest * 1000:.0f} ms"
    )
    # A blocked eviction may pass only if the machine was too busy to answer within the timeout.
    assert all(answer[:2] == ("held", 201) and answer[2] >= TIMEOUT for answer in wrong)
    assert len(wrong) <= failed_open


def _port(replica: Program) -> int:
    return int(replica.admission.rpartition(":")[2])


async def test_the_demo_shows_a_denial(tmp_path: Path) -> None:
    """With `demo --evictor webhook` the descheduler logs a denial, which the API also shows."""
    async with program(tmp_path, "demo", "--evictor", "webhook", "--speed", "10") as demo:
        await demo.ready()

        async def denied() -> Any:
            errors = demo.events("eviction_failed")
            return errors[0]["error"] if errors else None

        output = await poll(denied, within=60, what="a denial")
        assert await demo.sample(REVIEWS, outcome="denied") > 0
        namespace, name = output.partition("VMI ")[2].partition(":")[0].split("/")
        _, vmi = await demo.get(f"/v1/vmis/{namespace}/{name}")
    assert output.startswith("denied by the webhook: kubevirt-eviction-exporter: VMI")
    assert vmi["blockedEvictions"][0]["denied"]
