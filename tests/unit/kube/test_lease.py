"""The Lease's timing, on an event loop with simulated time.

`tests/integration/chaos/test_replicas.py` shows takeovers on a real API server.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

from exporter.engine.facts.model import Resource
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict, Unreachable, Unsupported
from exporter.kube.lease import Lease
from exporter.kube.login import Login
from tests.support.builders import NOW
from tests.support.skipped_time import in_its_own_time, now


DURATION = 24.0
HELD = 16.0
"""A holder relies on a renewal for this long after it sent the request."""
FREE = 19.2
"""A candidate takes a Lease that has not changed for this long since the candidate read it."""
RENEWED = (7.2, 8.0)
POLLED = (2.7, 3.0)
TINY = 1e-6


class Server(ApiServer):
    """An API server with one Lease, its versions and conflicts.

    `asked` has the time and verb of each request. An answer takes `takes` seconds. `refusal` has,
    by verb, the error that is raised instead of an answer. `body` replaces the body of every
    answer.
    """

    def __init__(self) -> None:
        super().__init__(Login(url="unused"), read_timeout=1)
        self.lease: dict[str, Any] | None = None
        self.asked: list[tuple[float, str]] = []
        self.takes = 0.0
        self.refusal: dict[str, ApiError] = {}
        self.body: bytes | None = None
        self._version = 0

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    def asked_for(self, verb: str) -> list[float]:
        return [when for when, asked in self.asked if asked == verb]

    def write(self, **spec: Any) -> None:
        """Write the Lease as another client."""
        self._version += 1
        self.lease = {"metadata": {"resourceVersion": str(self._version)}, "spec": spec}

    async def read(self, resource: Resource, namespace: str, name: str) -> bytes:
        await self._answer("read", resource, namespace, name)
        if self.lease is None:
            raise Absent("404")
        return self._encode()

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> bytes:
        await self._answer("replace", resource, namespace, name)
        assert (body["apiVersion"], body["kind"]) == ("coordination.k8s.io/v1", "Lease")
        assert (body["metadata"]["namespace"], body["metadata"]["name"]) == (namespace, name)
        version = body["metadata"].get("resourceVersion")
        if self.lease is not None and version is None:
            raise Unsupported("422 metadata.resourceVersion: must be specified for an update")
        if version != (self.lease and self.lease["metadata"]["resourceVersion"]):
            raise Conflict("409 the object has been modified")
        self.write(**body["spec"])
        return self._encode()

    def _encode(self) -> bytes:
        return json.dumps(self.lease).encode() if self.body is None else self.body

    async def _answer(self, verb: str, resource: Resource, *place: str) -> None:
        assert (resource, *place) == (Resource.LEASES, "ns", "writer")
        self.asked.append((now(), verb))
        await asyncio.sleep(self.takes)
        if verb in self.refusal:
            raise self.refusal[verb]


class Candidate(Lease):
    """A candidate on the loop's clock. `jump` moves its clock.

    `changes` has the times at which the candidate took (true) or lost (false) the Lease.
    """

    def __init__(self, server: Server, identity: str = "one", duration: float = DURATION) -> None:
        self.jump = 0.0
        super().__init__(
            server,
            "ns",
            "writer",
            identity=identity,
            duration=duration,
            rng=random.Random(1),
            wall=lambda: NOW + now(),
            monotonic=lambda: now() + self.jump,
        )
        self.changes: list[tuple[float, bool]] = []
        self._task: asyncio.Task[None] | None = None

    async def _take(self, seen: Any, began: float) -> None:
        was_held = self.held
        await super()._take(seen, began)
        if self.held and not was_held:
            self.changes.append((now(), True))

    def _lose(self, why: str) -> None:
        super()._lose(why)
        self.changes.append((now(), self.held))

    def begin(self) -> Self:
        """Start, or go on after a pause."""
        self._task = asyncio.create_task(self.run())
        return self

    async def pause(self) -> None:
        """Stop, like a frozen process."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def pass_time(seconds: float) -> list[Any]:
    """Let time pass; returns the log."""
    with capture_logs() as logs:
        await asyncio.sleep(seconds)
    return [*logs]


def a_candidate(**spec: Any) -> tuple[Server, Candidate]:
    """A server and a candidate that begins now. With a `spec`, the server already has a Lease."""
    server = Server()
    if spec:
        server.write(**spec)
    return server, Candidate(server).begin()


async def a_holder() -> tuple[Server, Candidate]:
    """A server and a candidate that took the Lease a second ago."""
    server, candidate = a_candidate()
    await asyncio.sleep(1)
    return server, candidate


def events_of(logs: list[Any]) -> list[tuple[str, str]]:
    """The events of a log, with their reasons."""
    return [(log["event"], log.get("why", "")) for log in logs]


def gaps(instants: list[float]) -> list[float]:
    """The times between instants."""
    return [later - earlier for earlier, later in pairwise(instants)]


def within(values: list[float], bounds: tuple[float, float]) -> bool:
    """Whether there are any values, and all of them are within the bounds."""
    low, high = bounds
    return bool(values) and all(low - TINY <= value <= high + TINY for value in values)


@in_its_own_time
async def test_the_first_creates_it() -> None:
    """The first candidate creates the Lease with holder, times and duration."""
    server, candidate = a_candidate()
    assert not candidate.held
    logs = await pass_time(1)

    assert candidate.held
    assert candidate.changes == [(0.0, True)]
    assert server.spec == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 24,
        "acquireTime": "2027-01-15T08:00:00.000000Z",
        "renewTime": "2027-01-15T08:00:00.000000Z",
    }
    assert logs == [
        {"event": "lease_taken", "lease": "writer", "holder": "one", "log_level": "info"}
    ]


@in_its_own_time
async def test_the_holder_renews() -> None:
    """The holder renews the Lease after each third of its duration, and logs no renewal."""
    server, candidate = a_candidate()
    logs = await pass_time(100)

    writes = server.asked_for("replace")
    assert within(gaps(writes), RENEWED)
    assert len(set(gaps(writes))) > 1, "not in step with others"
    assert candidate.changes == [(0.0, True)]
    assert events_of(logs) == [("lease_taken", "")]
    assert server.spec["acquireTime"] == "2027-01-15T08:00:00.000000Z"
    assert server.spec["renewTime"] > "2027-01-15T08:01:30"
    assert "leaseTransitions" not in server.spec


@pytest.mark.parametrize(("duration", "written"), [(0.4, 1), (1.0, 1), (1.49, 2), (15.0, 15)])
@in_its_own_time
async def test_a_duration_is_written_in_whole_seconds(duration: float, written: int) -> None:
    """The duration is rounded up to whole seconds."""
    server = Server()
    Candidate(server, duration=duration).begin()
    await asyncio.sleep(0.1)
    assert server.spec["leaseDurationSeconds"] == written


@in_its_own_time
async def test_the_lease_is_held_from_the_request_on() -> None:
    """The holder relies on the Lease for two thirds of its duration, counted from its request."""
    server, candidate = a_candidate()
    server.takes = 2.0
    await asyncio.sleep(5)
    assert candidate.changes == [(4.0, True)]
    await candidate.pause()

    candidate.jump = HELD - now() - 1 / 8
    assert candidate.held
    candidate.jump = HELD - now()
    assert not candidate.held


@in_its_own_time
async def test_the_second_polls_and_takes_over() -> None:
    """A second candidate takes a Lease that was unchanged for 0.8 of its duration."""
    server, holder = await a_holder()
    two = Candidate(server, "two").begin()
    await asyncio.sleep(99)
    assert two.changes == []
    await holder.pause()
    renewed = server.asked_for("replace")[-1]
    logs = await pass_time(30)

    taken = next(when for when in server.asked_for("replace") if when > renewed)
    seen, *reads = [when for when in server.asked_for("read") if renewed < when <= taken]
    assert taken == pytest.approx(seen + FREE, abs=TINY)
    assert seen <= renewed + POLLED[1]
    assert within(gaps([seen, *reads])[:-1], POLLED)
    assert two.changes == [(taken, True)]
    assert not holder.held
    assert events_of(logs) == [("lease_taken", "")]
    spec = server.spec
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("two", 1)
    assert spec["acquireTime"] > "2027-01-15T08:01:40"


@pytest.mark.parametrize(
    ("written", "free"),
    [
        pytest.param({"leaseDurationSeconds": 60}, 48.0, id="the-holder's-own"),
        pytest.param({}, FREE, id="none-written"),
    ],
)
@in_its_own_time
async def test_the_duration_in_the_lease_counts(written: dict[str, int], free: float) -> None:
    """The duration in the Lease counts; if there is none, our own duration counts."""
    server, candidate = a_candidate(holderIdentity="other", leaseTransitions=4, **written)
    server.takes = 0.5
    await asyncio.sleep(100)

    # The Lease was seen when the first answer came, and was free when the last request began.
    (taken, held), *_ = candidate.changes
    assert held
    assert 0.5 + free <= taken - 0.5 <= 0.5 + free + 0.5 + TINY
    assert server.spec["leaseTransitions"] == 5
    assert server.spec["leaseDurationSeconds"] == 24


ITS_OWN = {"holderIdentity": "one", "acquireTime": "then", "leaseTransitions": 3}


@pytest.mark.parametrize(
    ("written", "acquired", "transitions"),
    [
        pytest.param({"leaseDurationSeconds": 1}, "2027-01-15T08:00:00.000000Z", 1, id="nobody-s"),
        pytest.param(ITS_OWN, "then", 3, id="its-own"),
    ],
)
@in_its_own_time
async def test_a_lease_is_taken_at_once(
    written: dict[str, Any], acquired: str, transitions: int
) -> None:
    """A Lease without a holder is taken at once, and a Lease in our own name is renewed at once."""
    server, candidate = a_candidate(**written)
    await asyncio.sleep(1)

    assert candidate.changes == [(0.0, True)]
    assert server.spec["acquireTime"] == acquired
    assert server.spec["leaseTransitions"] == transitions


@in_its_own_time
async def test_another_has_taken_it() -> None:
    """A holder that finds another holder's name in the Lease logs this once, and waits.

    The name is another program's text, so it is cut.
    """
    server, holder = await a_holder()
    server.write(holderIdentity=2000 * "2", leaseDurationSeconds=24)
    logs = await pass_time(18)

    assert [held for _, held in holder.changes] == [True, False]
    assert logs == [
        {
            "event": "lease_lost",
            "lease": "writer",
            "why": f"{1023 * '2'}… has taken it",
            "log_level": "warning",
        }
    ]
    assert server.spec["holderIdentity"] == 2000 * "2"


@in_its_own_time
async def test_a_deleted_lease_is_created_again() -> None:
    """The holder creates a deleted Lease again."""
    server, holder = await a_holder()
    server.lease = None
    await asyncio.sleep(10)

    assert holder.changes == [(0.0, True)]
    assert server.spec["holderIdentity"] == "one"
    assert "leaseTransitions" not in server.spec


@in_its_own_time
async def test_another_replica_creates_a_deleted_lease_first() -> None:
    """If another replica creates the deleted Lease first, the holder loses it at once."""
    server, holder = await a_holder()
    server.lease = None
    server.refusal["replace"] = Conflict("409")
    logs = await pass_time(16)

    assert [held for _, held in holder.changes] == [True, False]
    assert events_of(logs) == [("lease_lost", "another replica took it first")]
    # The former holder now reads the Lease as often as any candidate.
    assert within(gaps(server.asked_for("read")[1:]), POLLED)


@in_its_own_time
async def test_a_conflict_does_not_lose_the_lease() -> None:
    """A holder whose renewals conflict with another write for a short time keeps the Lease."""
    server, holder = await a_holder()
    server.refusal["replace"] = Conflict("409")
    with capture_logs() as logs:
        await asyncio.sleep(9)
        server.refusal.clear()
        await asyncio.sleep(30)

    assert holder.changes == [(0.0, True)]
    assert events_of(logs) == []


@in_its_own_time
async def test_the_slower_candidate_reads_again_at_once() -> None:
    """A candidate that loses the race for a free Lease reads the Lease again at once."""
    server, candidate = a_candidate(holderIdentity="other", leaseDurationSeconds=24)
    server.refusal["replace"] = Conflict("409")
    logs = await pass_time(FREE + 0.105)

    (first, *_) = server.asked_for("replace")
    assert first == pytest.approx(FREE)
    assert 10 <= len(server.asked_for("replace")) <= 11
    assert (candidate.changes, logs) == ([], [])


@in_its_own_time
async def test_the_slower_creator_waits() -> None:
    """A candidate that loses the race to create the Lease waits as usual."""
    server, candidate = a_candidate()
    server.refusal["replace"] = Unsupported("422 must be specified for an update")
    logs = await pass_time(60)

    assert within(gaps(server.asked_for("replace")), POLLED)
    assert (candidate.changes, logs) == ([], [])


@in_its_own_time
async def test_an_invalid_renewal_is_logged() -> None:
    """A renewal that the API server calls invalid is logged."""
    server, _ = await a_holder()
    server.refusal["replace"] = Unsupported("422 spec.holderIdentity: invalid")
    logs = await pass_time(10)

    assert events_of(logs) == [("lease_unreachable", "422 spec.holderIdentity: invalid")]


@in_its_own_time
async def test_a_holder_that_cannot_renew() -> None:
    """A holder that cannot renew loses the Lease by its own clock, and takes it again later."""
    server, holder = await a_holder()
    server.refusal["read"] = Unreachable("500 gone")
    server.asked.clear()
    with capture_logs() as logs:
        await asyncio.sleep(59)
        server.refusal.clear()
        tried = server.asked_for("read")
        await asyncio.sleep(10)
        server.refusal["read"] = Unreachable("500 gone")
        await asyncio.sleep(10)

    assert within(gaps(tried), POLLED)
    (lost, held), (back, again) = holder.changes[1:]
    assert (held, again) == (False, True)
    assert HELD <= lost <= HELD + POLLED[1]
    assert 60 <= back <= 60 + POLLED[1]
    assert events_of(logs) == [
        ("lease_unreachable", "500 gone"),
        ("lease_lost", "not renewed in time"),
        ("lease_taken", ""),
        ("lease_unreachable", "500 gone"),
    ]


@in_its_own_time
async def test_a_server_that_does_not_answer() -> None:
    """A request without an answer ends after a third of the Lease's duration, and is repeated."""
    server, _ = a_candidate()
    server.takes = 1_000.0
    logs = await pass_time(60)

    assert within(gaps(server.asked_for("read")), (8 + POLLED[0], 8 + POLLED[1]))
    assert events_of(logs) == [("lease_unreachable", "TimeoutError")]


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 100_000,
        b'{"spec":{"holderIdentity":"\xff"}}',
        b'{"spec":{"holderIdentity":7}}',
    ],
    ids=["nested", "utf-8", "type"],
)
@in_its_own_time
async def test_a_malformed_lease(body: bytes) -> None:
    """An answer that cannot be decoded is logged once, and the request is repeated."""
    server, _ = a_candidate()
    server.body = body
    logs = await pass_time(10)

    assert [event for event, _ in events_of(logs)] == ["lease_unreachable"]
    assert len(server.asked_for("read")) > 2


@in_its_own_time
async def test_released() -> None:
    """At shutdown the holder releases the Lease."""
    server, holder = await a_holder()
    await holder.pause()
    server.takes = 2.0
    with capture_logs() as logs:
        giving = asyncio.create_task(holder.release())
        await asyncio.sleep(1)
        assert not holder.held
        await giving
        await holder.release()

    assert server.spec == {"leaseDurationSeconds": 1}
    assert logs == [{"event": "lease_released", "lease": "writer", "log_level": "info"}]
    assert len(server.asked_for("replace")) == 2


@in_its_own_time
async def test_what_is_not_held_is_not_released() -> None:
    """At shutdown a candidate that does not hold the Lease writes nothing."""
    server, candidate = a_candidate(holderIdentity="other", leaseDurationSeconds=24)
    await asyncio.sleep(1)
    await candidate.pause()
    await candidate.release()

    assert server.asked_for("replace") == []


@pytest.mark.parametrize(
    ("refusal", "body"),
    [({"replace": Unreachable("500 gone")}, None), ({}, b'{"x":' + b"[" * 100_000)],
    ids=["refused", "malformed"],
)
@in_its_own_time
async def test_a_lease_that_cannot_be_released(
    refusal: dict[str, ApiError], body: bytes | None
) -> None:
    """A failure to release the Lease is logged and not raised."""
    server, holder = await a_holder()
    await holder.pause()
    server.refusal, server.body = refusal, body
    with capture_logs() as logs:
        await holder.release()

    assert not holder.held
    assert [log["event"] for log in logs] == ["lease_not_released"]
