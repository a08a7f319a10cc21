"""The blocked set is up to date, and its changes answer long polls."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.model import Checkpoint, Resource
from exporter.engine.verdicts.view import VMIS_AT_ONCE
from exporter.health import Watched
from exporter.server.api.blocked_set import MOVES_EVERY, Blocked, BlockedSet
from exporter.server.api.long_polls import BATCH, CHECK_EVERY, SETTLING
from exporter.text import to_datetime
from tests.cluster import PATIENCE
from tests.support.blocked import read
from tests.support.builders import (
    NOW,
    UID,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.stores import a_verdict_view
from tests.unit.server.api.test_handlers import ServedApi


HOUR = 3600.0
"""A wait so long that only a change can answer the long poll within `PATIENCE`."""


def afresh(scene: ServedApi) -> BlockedSet:
    """A blocked set of the same facts, with nothing cached."""
    return BlockedSet(a_verdict_view(scene.store, scene.policy), scene.health, scene.clock)


@pytest.fixture
def scene() -> ServedApi:
    """A service over an empty store, without HTTP."""
    return ServedApi()


async def begin(
    scene: ServedApi, checkpoint: Checkpoint | None, known: str
) -> asyncio.Task[Blocked]:
    """Begin a long poll."""
    waiting = asyncio.create_task(scene.polls.wait(checkpoint, known, HOUR))
    await asyncio.sleep(0)
    return waiting


async def begin_many(scene: ServedApi, count: int) -> list[asyncio.Task[Blocked]]:
    """Begin this many long polls, each with the ETag of the present set."""
    known = read(scene.blocked, None).etag
    waiting = [asyncio.create_task(scene.polls.wait(None, known, HOUR)) for _ in range(count)]
    await asyncio.sleep(0)
    return waiting


def keys(blocked: Blocked) -> list[tuple[str, str]]:
    """The blocked VMIs with their checkpoints."""
    return [(entry.name, entry.checkpoint) for entry in blocked.entries]


class TestRead:
    """Reading the set."""

    def test_a_namespace_that_is_lost_is_judged_alone(self, scene: ServedApi) -> None:
        """The evidence of a forbidden namespace becomes stale and then dead; other namespaces stay
        current.
        """
        healthy, lost = (Watched(Resource.VMIS, n, synced=True, contact=NOW) for n in "ab")
        scene.health.watched = [healthy, lost]
        for namespace in "ab":
            scene.store.put(a_vmi(namespace=namespace, uid=namespace, migration=a_running_state()))
        fresh = read(scene.blocked, None)
        lost.rejected = "403 no"
        stale = read(scene.blocked, None)
        scene.clock.instant = healthy.contact = NOW + 780.0
        silent = read(scene.blocked, None)

        answers = [([vmi.namespace for vmi in b.entries], b.stale) for b in (fresh, stale, silent)]
        assert answers == [(["a", "b"], False), (["a", "b"], True), (["a"], False)]

    def test_an_end_ahead_of_the_clock_does_not_tick(self, scene: ServedApi) -> None:
        """If a migration's end is ahead of our clock, `notBefore` moves but the ETag does not."""
        scene.store.put(a_vmi(migration=a_state(start=NOW, end=NOW + 60.0)))
        answers = []
        for passed in (0.0, 10.0, 59.0, 61.0, 100.0):
            scene.clock.instant = NOW + passed
            answers.append(read(scene.blocked, None))

        assert len({blocked.etag for blocked in answers}) == 1
        assert [blocked.entries[0].not_before for blocked in answers] == [
            to_datetime(NOW + seconds) for seconds in (900, 910, 959, 960, 960)
        ]

    @given(
        ends=st.lists(st.integers(-4000, 900), max_size=5),
        instants=st.lists(st.floats(-100.0, 2000.0), min_size=2, max_size=6).flatmap(
            lambda instants: st.sampled_from([instants, sorted(instants)])
        ),
        window=st.sampled_from([0.0, 500.0, 3000.0]),
    )
    def test_what_is_kept_is_what_would_be_computed(
        self, ends: list[int], instants: list[float], window: float
    ) -> None:
        """At any time the cached set equals a newly computed one."""
        scene = ServedApi(
            policy=a_policy(migration_cooldown=300.0, migration_history_window=window)
        )
        for number, end in enumerate(ends):
            fields = {"start": NOW + end - 5.0, "end": NOW + end}
            scene.store.put(
                an_ended_vmim(name=f"m{number}", uid=f"m{number}", finished_at=NOW + end, **fields)
            )
            scene.store.put(a_vmi(migration=a_state(uid=f"m{number}", **fields)))
        for passed in instants:
            scene.clock.instant = NOW + passed
            kept, fresh = read(scene.blocked, None), read(afresh(scene), None)

            assert kept.etag == fresh.etag
            assert keys(kept) == keys(fresh)

    @given(
        ends=st.lists(st.integers(-2000, 300), max_size=4),
        instants=st.lists(st.floats(0.0, 3000.0), min_size=2, max_size=8),
    )
    def test_equal_etags_mean_equal_sets(self, ends: list[int], instants: list[float]) -> None:
        """Two answers have the same ETag if and only if they have the same entries."""
        scene = ServedApi(policy=a_policy(migration_cooldown=300.0))
        for number, end in enumerate(ends):
            state = a_state(uid=f"m{number}", start=NOW + end - 5.0, end=NOW + end)
            scene.store.put(a_vmi(name=f"v{number}", uid=f"u{number}", migration=state))
        answered = set()
        for passed in instants:
            scene.clock.instant = NOW + passed
            scene.renew_contact()
            blocked = read(afresh(scene), None)
            answered.add((blocked.etag, tuple(keys(blocked))))

        assert (
            len({etag for etag, _ in answered})
            == len({blocked for _, blocked in answered})
            == len(answered)
        )


class TestManyVmis:
    """A set that takes long to compute, because it has many VMIs."""

    MANY = 5 * VMIS_AT_ONCE

    @pytest.fixture
    def scene(self, scene: ServedApi) -> ServedApi:
        """A service with many VMs that cool down."""
        for number in range(self.MANY):
            scene.cool(f"v{number:04}")
        return scene

    async def test_computing_yields_to_others(self, scene: ServedApi) -> None:
        """Computing the set yields to the event loop after each slice."""
        turns = 0
        reading = asyncio.create_task(scene.blocked.read(None))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)

        assert len(reading.result().entries) == self.MANY
        assert turns >= 2 * (self.MANY // VMIS_AT_ONCE)

    async def test_callers_at_the_same_time_share_it(self, scene: ServedApi) -> None:
        """Requests that arrive during a computation share the next one."""
        first = asyncio.create_task(scene.blocked.read(None))
        await asyncio.sleep(0)
        scene.cool("a")
        later = await asyncio.gather(*(scene.blocked.read(None) for _ in range(10)))

        assert len({id(blocked) for blocked in later}) == 1
        assert keys(later[0])[0] == ("a", "preEviction")
        assert len((await first).entries) in (self.MANY, self.MANY + 1)

    async def test_a_change_while_it_is_computed_is_in_the_next(self, scene: ServedApi) -> None:
        """A change during a computation is in the next answer, even if its VMI was already
        computed.
        """
        reading = asyncio.create_task(scene.blocked.read(None))
        for _ in range(2 * (self.MANY // VMIS_AT_ONCE) - 2):
            await asyncio.sleep(0)
        scene.cool("a")
        scene.cool("v0000", left=-1.0)
        await reading

        names = [name for name, _ in keys(await scene.blocked.read(None))]
        assert names[0] == "a"
        assert "v0000" not in names
        assert keys(await scene.blocked.read(None)) == keys(await afresh(scene).read(None))

    async def test_a_change_while_it_is_computed_releases(self, scene: ServedApi) -> None:
        """A change during the first computation of a long poll answers that long poll."""
        scene.store.put(a_vmi(name="ahead", uid="h", migration=a_state(start=NOW, end=NOW + 60.0)))
        known = (await scene.blocked.read(None)).etag
        scene.clock.instant += MOVES_EVERY
        waiting = asyncio.create_task(scene.polls.wait(None, known, HOUR))
        for _ in range(self.MANY // VMIS_AT_ONCE - 1):
            await asyncio.sleep(0)
        scene.cool("a")
        blocked = await asyncio.wait_for(waiting, PATIENCE)

        assert keys(blocked)[0] == ("a", "preEviction")


class TestWait:
    """Waiting for a change."""

    async def test_a_change_back_releases(self, scene: ServedApi) -> None:
        """A long poll is answered when the set changes back to an earlier state."""
        none = (await scene.blocked.read(None)).etag
        first = await begin(scene, None, none)
        scene.cool()
        etag = (await scene.blocked.read(None)).etag
        second = await begin(scene, None, etag)
        scene.cool(left=-1.0)
        answer = await asyncio.wait_for(second, PATIENCE)
        scene.polls.close()
        await first

        assert answer.etag == none

    async def test_the_clock_releases(self) -> None:
        """A long poll is answered when a cooldown ends."""
        scene = ServedApi(policy=a_policy(migration_cooldown=1.0))
        scene.store.put(a_vmi(migration=a_state(start=NOW, end=NOW)))
        scene.clock.run()
        known = read(scene.blocked, None)
        blocked = await asyncio.wait_for(scene.polls.wait(None, known.etag, HOUR), PATIENCE)

        assert keys(known) == [("db1", "preEviction")]
        assert keys(blocked) == []
        assert scene.clock() >= NOW + 1.0

    async def test_turning_stale_releases(self, scene: ServedApi) -> None:
        """A long poll is answered when the evidence becomes stale."""
        scene.health.stale_after = 1.0
        scene.clock.run()
        known = read(scene.blocked, None)
        blocked = await asyncio.wait_for(scene.polls.wait(None, known.etag, HOUR), PATIENCE)

        assert (known.stale, blocked.stale) == (False, True)

    async def test_a_sign_of_life_releases(self, scene: ServedApi) -> None:
        """A long poll is answered at the first contact after stale evidence."""
        scene.clock.instant = NOW + 500.0
        known = read(scene.blocked, None)
        waiting = await begin(scene, None, known.etag)
        scene.renew_contact()
        blocked = await asyncio.wait_for(waiting, CHECK_EVERY + PATIENCE)

        assert (known.stale, blocked.stale) == (True, False)

    async def test_closing_releases(self, scene: ServedApi) -> None:
        """Shutdown answers every long poll at once."""
        known = read(scene.blocked, None).etag
        waiting = await begin_many(scene, 500)
        scene.service.close()
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*waiting)
            late = await scene.polls.wait(None, known, HOUR)

        assert {blocked.etag for blocked in (*answers, late)} == {known}

    @pytest.mark.parametrize("ticking", [False, True], ids=["clock-stands", "clock-runs"])
    async def test_waits_no_longer_than_asked(self, scene: ServedApi, ticking: bool) -> None:
        """Without a change a long poll ends after its wait, even if the wall clock stands still."""
        if ticking:
            scene.clock.run()
        known = read(scene.blocked, None).etag
        loop = asyncio.get_running_loop()
        began = loop.time()
        blocked = await asyncio.wait_for(scene.polls.wait(None, known, 0.2), PATIENCE)

        assert blocked.etag == known
        assert loop.time() - began >= 0.19

    async def test_a_rule_that_falls_silent_releases(self, scene: ServedApi) -> None:
        """A long poll is answered when the watch of VMIMs becomes dead, and when it is back."""
        vmims = scene.health.of(Resource.VMIMS)[0]
        vmims.contact = NOW - 779.9
        scene.store.put(a_vmi(uid=UID))
        scene.store.put(a_vmim())
        before = read(scene.blocked, None)
        scene.clock.run()
        silent = await asyncio.wait_for(scene.polls.wait(None, before.etag, HOUR), PATIENCE)
        waiting = await begin(scene, None, silent.etag)
        vmims.contact = scene.clock()
        after = await asyncio.wait_for(waiting, PATIENCE)

        assert [keys(blocked) for blocked in (before, silent, after)] == [
            [("db1", "filter")],
            [],
            [("db1", "filter")],
        ]
        assert not any(blocked.stale for blocked in (before, silent, after))

    async def test_a_change_elsewhere_does_not_release(self, scene: ServedApi) -> None:
        """A change at another checkpoint does not answer a long poll."""
        known = read(scene.blocked, Checkpoint.FILTER).etag
        waiting = await begin(scene, Checkpoint.FILTER, known)
        both = await begin(scene, None, read(scene.blocked, None).etag)
        scene.cool()
        await asyncio.wait_for(both, PATIENCE)
        still_waiting = not waiting.done()
        scene.store.put(a_vmi(name="x", uid="x", migration=a_running_state()))
        blocked = await asyncio.wait_for(waiting, PATIENCE)

        assert still_waiting
        assert keys(blocked) == [("x", "filter")]

    async def test_a_change_that_leaves_the_set_wakes_nobody(self, scene: ServedApi) -> None:
        """A change that does not alter the set is checked once, and answers no long poll."""
        waiting = await begin_many(scene, 100)
        reads = 0

        def count_read() -> float:
            nonlocal reads
            reads += 1
            return scene.clock()

        scene.blocked.clock = count_read
        scene.store.put(a_vmi(name="another", uid="another"))
        while not reads:  # noqa: ASYNC110 (there is no notification)
            await asyncio.sleep(SETTLING)
        await asyncio.sleep(SETTLING)
        reads_by_all, still_waiting = reads, scene.polls.waiting
        scene.polls.close()
        await asyncio.gather(*waiting)

        assert reads_by_all <= 4
        assert still_waiting == 100

    async def test_waking_many_yields_to_others(self, scene: ServedApi) -> None:
        """Many long polls are answered in batches."""
        waiting = await begin_many(scene, 5 * BATCH)
        scene.cool()
        seen = []
        async with asyncio.timeout(PATIENCE):
            while scene.polls.waiting:
                seen.append(scene.polls.waiting)
                await asyncio.sleep(0)
        answers = await asyncio.gather(*waiting)

        assert sorted(set(seen)) == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH, 5 * BATCH]
        assert {len(blocked.entries) for blocked in answers} == {1}

    async def test_many_changes_wake_once(self, scene: ServedApi) -> None:
        """Many changes in a short time answer the long polls once."""
        waiting = await begin_many(scene, 1000)
        for number in range(50):
            scene.cool(f"v{number}")
        answers = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)

        assert {len(blocked.entries) for blocked in answers} == {50}
        assert len({id(blocked) for blocked in answers}) == 1
