"""The progress of a watch: backoff, refusals, the present error and the last contact.

The API server follows a script, and simulated hours pass at once.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain, pairwise
from typing import Any, TypeAlias

from exporter.engine.facts.model import Resource, Seconds
from exporter.health import Restart, Watched
from exporter.kube.client import (
    ApiServer,
    Expired,
    Forbidden,
    Overloaded,
    Unconnected,
    Unreachable,
)
from exporter.kube.login import Login
from exporter.kube.watch.reflector import FINAL_AFTER_SYNC, Reflector
from exporter.settings import KubeSettings
from tests.cluster import vmi
from tests.support.skipped_time import in_its_own_time, now
from tests.support.stores import ClockedStore
from tests.support.watching import Paging


MINUTE = 60.0
HOUR = 60 * MINUTE

Step: TypeAlias = float | Exception | dict[str, Any]
"""One step of a connection: wait for this many seconds, raise this error, or send this event."""
Page: TypeAlias = dict[str, Any] | Exception


def reset() -> Exception:
    """The error of a broken connection."""
    return Unreachable("connection reset")


def stored(name: str) -> dict[str, Any]:
    """A VMI as the API server returns it."""
    return vmi(name, "shop", metadata={"uid": f"of-{name}", "resourceVersion": "7"})


def event(kind: str = "MODIFIED") -> dict[str, Any]:
    """One event of a watch."""
    return {"type": kind, "object": stored("a")}


def healthy(*, lasts: Seconds) -> list[Step]:
    """A connection that sends an event each minute and then breaks."""
    minutes = round(lasts / MINUTE)
    return [step for _ in range(minutes) for step in (MINUTE, event())] + [reset()]


def page(*names: str, more: str = "") -> dict[str, Any]:
    """One page of a list of VMIs."""
    return {
        "metadata": {"resourceVersion": "1", "continue": more},
        "items": [stored(name) for name in names],
    }


class Scripted(ApiServer):
    """An API server that gives these connections and pages in order, and then sends nothing."""

    def __init__(self, connections: Iterable[list[Step]], pages: Iterable[Page] = ()) -> None:
        super().__init__(Login(url="http://127.0.0.1:1"), read_timeout=HOUR)
        self._connections = iter(connections)
        self._pages = iter(pages)
        self.opened: list[float] = []
        """The times at which a watch was requested."""

    async def list_page(self, *_: object, **__: object) -> bytes:
        answer = next(self._pages, page())
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()

    @asynccontextmanager
    async def watch(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        self.opened.append(now())
        steps = next(self._connections, None)
        if steps and isinstance(steps[0], Exception):
            raise steps[0]
        yield _play(steps)

    async def renew(self) -> None:
        """Do nothing, as there are no credentials."""


async def _play(steps: list[Step] | None) -> AsyncIterator[list[bytes]]:
    if steps is None:
        await asyncio.Event().wait()
    for step in steps or ():
        match step:
            case Exception():
                raise step
            case dict():
                yield [json.dumps(step).encode()]
            case _:
                await asyncio.sleep(step)


async def follow(
    api: Scripted,
    *,
    lasts: Seconds,
    each: Callable[[Watched], None] = lambda _: None,
    reflector: type[Reflector] = Paging,
) -> Watched:
    """Run a reflector for this long, and call `each` every ten seconds."""
    watched = Watched(Resource.VMIS, None)
    running = asyncio.create_task(
        reflector(
            api,
            watched,
            ClockedStore(keep=16),
            # After its last connection the server sends nothing, and this is not what is tested.
            KubeSettings(read_timeout=2 * lasts),
            clock=now,
            rng=random.Random(1),
        ).run()
    )
    while now() < lasts:
        await asyncio.sleep(10.0)
        each(watched)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return watched


@in_its_own_time
async def test_a_connection_that_worked_is_opened_again_at_once() -> None:
    """A connection that breaks after an hour of events is opened again at once."""
    api = Scripted(healthy(lasts=HOUR) for _ in range(12))
    watched = await follow(api, lasts=13 * HOUR)

    pauses = [later - former - HOUR for former, later in pairwise(api.opened)]
    assert len(pauses) == 12
    assert max(pauses) < 0.25
    assert (watched.lists, watched.restarts) == (1, {Restart.UNREACHABLE: 12})


@in_its_own_time
async def test_a_connection_that_breaks_after_each_event_is_opened_less_and_less_often() -> None:
    """If each connection breaks after one event, the pauses between the connections grow."""
    api = Scripted([event(), reset()] for _ in range(1000))
    await follow(api, lasts=HOUR)
    assert 100 < len(api.opened) < 300


@in_its_own_time
async def test_refusals_with_events_between_them_do_not_add_up() -> None:
    """An event between two 403 answers resets the count of 403 answers."""
    starting: list[Step] = [Forbidden("403 roles are not loaded")]
    lives = (life for _ in range(FINAL_AFTER_SYNC + 3) for life in (healthy(lasts=HOUR), starting))
    watched = await follow(Scripted(lives), lasts=15 * HOUR)
    assert watched.restarts[Restart.DENIED] == FINAL_AFTER_SYNC + 3
    assert not watched.rejected
    assert watched.lists == 1


@in_its_own_time
async def test_an_error_is_over_with_the_next_event() -> None:
    """The error of a watch is reported until the next event comes."""
    seen: list[tuple[float, str]] = []
    api = Scripted([[reset()], healthy(lasts=HOUR)])
    await follow(
        api,
        lasts=HOUR / 2,
        each=lambda watched: seen.append((now(), watched.trouble)),
    )
    assert {text for at, text in seen if at < MINUTE} == {"connection reset"}
    assert {text for at, text in seen if at > MINUTE + 10} == {""}


@in_its_own_time
async def test_a_list_that_does_not_end_is_no_contact() -> None:
    """A list without its last page does not count as contact."""
    gone: list[Step] = [Expired("410 Gone")]
    pages = [page("a", more="t"), page("b")]
    again = (answer for _ in range(1000) for answer in (page("a", more="t"), Overloaded("429", 0)))
    watched = await follow(Scripted([gone], chain(pages, again)), lasts=HOUR)
    assert (watched.lists, watched.contact) == (1, 0.0)
    assert watched.trouble == "429"


@in_its_own_time
async def test_a_streamed_list_that_does_not_end_is_no_contact() -> None:
    """A streamed list that breaks before its end does not count as contact."""
    api = Scripted([event("ADDED"), reset()] for _ in range(1000))
    watched = await follow(api, lasts=HOUR, reflector=Reflector)
    assert (watched.lists, watched.contact) == (0, None)


def find_pauses(api: Scripted) -> list[Seconds]:
    """The pauses between the requests for a watch."""
    return [later - former for former, later in pairwise(api.opened)]


@in_its_own_time
async def test_a_server_that_is_away_is_asked_at_least_every_two_seconds() -> None:
    """As long as nothing answers, the pauses are between 1 and 1.5 seconds, and none is alike."""
    api = Scripted([Unconnected("connection refused")] for _ in range(1000))
    await follow(api, lasts=HOUR / 4)
    pauses = find_pauses(api)[5:]
    assert 1.0 <= min(pauses) < 1.1
    assert 1.45 < max(pauses) <= 1.5


@in_its_own_time
async def test_a_server_that_starts_is_followed_within_seconds() -> None:
    """Each other answer of a server that starts shortens the pause before the next request."""
    away: list[list[Step]] = [[Unconnected("connection refused")] for _ in range(60)]
    starting: list[list[Step]] = [
        [Forbidden("403 roles are not loaded")],
        [Overloaded("429 storage is initializing", 1.0)],
        [Expired("410 Gone")],
    ]
    api = Scripted([*away, *starting, healthy(lasts=HOUR)])
    await follow(api, lasts=HOUR)
    pauses = find_pauses(api)[len(away) - 1 :]
    assert all(1.0 <= pause <= 1.5 for pause in pauses[:4])
    assert len(pauses) >= 4


@in_its_own_time
async def test_answers_that_alternate_are_asked_for_at_most_once_a_second() -> None:
    """A server that gives two refusals in turn is not asked more often than once a second."""
    refusals = [Overloaded("429", 0.0), Unreachable("503")]
    api = Scripted([error] for _ in range(1000) for error in refusals)
    await follow(api, lasts=HOUR / 4)
    assert len(api.opened) <= HOUR / 4


@in_its_own_time
async def test_a_server_that_stays_overloaded_is_asked_less_and_less_often() -> None:
    """A refusal that stays the same makes the pauses longer, up to half a minute."""
    api = Scripted([Overloaded("429", 0.0)] for _ in range(1000))
    await follow(api, lasts=HOUR)
    assert min(find_pauses(api)[10:]) >= 15.0
