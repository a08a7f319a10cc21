"""The stored history after a restart: a killed process loses nothing that was stored."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from exporter.engine.facts.changes import Notice, NoticeKind
from exporter.engine.facts.evidence import FAILURES_KEPT
from exporter.engine.facts.model import Fact, MigrationState, Resource, Vmi, Vmim
from exporter.engine.store.evacuation_ends import EvacuationEnd, EvacuationOutcome
from exporter.history.changes import AWAITED_FOR, PendingChanges
from exporter.history.format import SHARDS, seal, shard_of, unseal
from exporter.history.writer import SLICE
from exporter.tasks import run_in_slices
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_state,
    a_store,
    a_vmi,
    an_ended_vmim,
)
from tests.support.stored_history import finish
from tests.support.stores import pending_changes, put, remove
from tests.unit.engine.facts.test_evidence import an_attempt, marker_of
from tests.unit.history.life import Life, answers_of


WINDOW = 86_400.0


def some_changes(*facts: Fact) -> PendingChanges:
    """The pending changes of a store with these facts."""
    changes = pending_changes(a_store(now=NOW), window=WINDOW)
    follow(changes, *facts)
    return changes


def follow(changes: PendingChanges, *facts: Fact, at: float = NOW) -> None:
    """Put facts into the store, and encode the VMIs that they change."""
    put(changes.store, *facts)
    finish(changes.encode_changed(at))


def shards(changes: PendingChanges) -> list[bytes]:
    """All shards that have entries."""
    listed = map(changes.entries, range(SHARDS))
    return [seal(entries) for entries in listed if entries]


def a_successor(kept: Iterable[bytes], *facts: Fact) -> PendingChanges:
    """The changes of another process, which reads the stored history first and then these facts."""
    changes = some_changes()
    take(changes, kept)
    follow(changes, *facts)
    return changes


def a_moved_vmi(**overrides: Any) -> Vmi:
    """A VMI whose migration m1 has ended."""
    return a_vmi(**({"migration": a_state(start=NOW - 60, end=NOW - 30)} | overrides))


class TestFollowing:
    """Only VMIs that changed are encoded, and only changes are written."""

    def test_a_vmi_that_never_moved_takes_nothing(self) -> None:
        """A VMI that never migrated has no entry."""
        changes = some_changes(a_vmi())
        assert (len(changes), changes.unwritten, changes.unwritten_since) == (0, [], None)

    def test_news(self) -> None:
        """A migration or marker is unwritten until it is stored; a change of node is ignored."""
        changes = some_changes(a_moved_vmi())
        shard = shard_of(UID)
        assert (len(changes), changes.unwritten, changes.unwritten_since) == (1, [shard], NOW)
        changes.note_written(shard)
        follow(changes, a_moved_vmi(node="n2"), at=NOW + 1)
        assert (changes.unwritten, changes.unwritten_since) == ([], None), "nothing to remember"
        follow(changes, a_moved_vmi(evacuation_node="n1"), at=NOW + 2)
        assert (changes.unwritten, changes.unwritten_since) == ([shard], NOW + 2)

    def test_pruned_with_the_vmi(self) -> None:
        """A deleted VMI loses its entry, and a new VMI of the same name gets none."""
        changes = some_changes(a_moved_vmi())
        remove(changes.store, Resource.VMIS, NAMESPACE, NAME)
        finish(changes.encode_changed(NOW))
        assert len(changes) == 0
        follow(changes, a_moved_vmi(), a_vmi(uid="another"))
        assert len(changes) == 0

    def test_size(self) -> None:
        """The size is the sum of the sizes of the entries."""
        assert some_changes().size == 0
        changes = some_changes(a_moved_vmi())
        alone = changes.size
        assert alone > 30
        follow(changes, a_moved_vmi(name="b", uid="b"))
        assert changes.size > alone
        remove(changes.store, Resource.VMIS, NAMESPACE, "b")
        finish(changes.encode_changed(NOW))
        assert changes.size == alone

    async def test_many_vmis_are_encoded_in_slices(self) -> None:
        """After every `SLICE` VMIs other tasks can run."""
        changes = some_changes()
        for number in range(2 * SLICE + 1):
            put(changes.store, a_moved_vmi(name=f"v{number}", uid=f"u{number}"))
        encoded: list[int] = []

        async def count() -> None:
            while True:
                encoded.append(len(changes))
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await run_in_slices(changes.encode_changed(NOW), most=SLICE)
        counting.cancel()

        assert encoded == [SLICE, 2 * SLICE]
        assert len(changes) == 2 * SLICE + 1


class TestVmisNotSeen:
    """The entry of a VMI that the watch has not shown is kept until the VMI is known to be gone."""

    KEPT = shards(some_changes(a_moved_vmi()))

    def test_kept_while_its_namespace_is_not_watched(self) -> None:
        """The entry of a VMI in a namespace that is not watched is kept."""
        successor = a_successor(self.KEPT)
        finish(successor.prune(lambda _: None, NOW))
        finish(successor.encode_changed(NOW + 1e6))
        assert shards(successor) == self.KEPT
        assert successor.awaits_vmis

    def test_dropped_once_its_namespace_was_seen_whole(self) -> None:
        """The entry of an unseen VMI is dropped after a minute of contact with its namespace."""
        successor = a_successor(self.KEPT)
        finish(successor.prune({NAMESPACE: NOW + AWAITED_FOR - 1}.get, NOW))
        assert successor.awaits_vmis
        finish(successor.prune({NAMESPACE: NOW + AWAITED_FOR}.get, NOW))
        finish(successor.encode_changed(NOW))
        assert (successor.awaits_vmis, len(successor)) == (False, 0)

    def test_dropped_where_the_writer_dropped_it(self) -> None:
        """The entry of an unseen VMI is dropped if the writer has dropped it."""
        successor = a_successor(self.KEPT)
        finish(successor.load(shard_of(UID), unseal(self.KEPT[0]), NOW, replaces=True))
        assert successor.store.unseen(UID)
        finish(successor.load(shard_of(UID), [], NOW, replaces=True))
        finish(successor.encode_changed(NOW))
        assert len(successor) == 0

    def test_a_vmi_that_is_seen_is_never_dropped(self) -> None:
        """The entry of a VMI that the watch has shown is never dropped."""
        successor = a_successor(self.KEPT, a_vmi())
        finish(successor.load(shard_of(UID), [], NOW, replaces=True))
        finish(successor.prune({NAMESPACE: NOW + 1e6}.get, NOW))
        finish(successor.encode_changed(NOW))
        assert shards(successor) == self.KEPT


class TestEndsOfEvacuations:
    """Each end is counted once, by the process that writes it."""

    def an_ended_one(self) -> tuple[PendingChanges, list[EvacuationEnd]]:
        """The changes of a process that has stored an evacuation, and its ends that are counted."""
        changes, counted = some_changes(a_vmi(evacuation_node="n1")), list[EvacuationEnd]()
        changes.count_end = counted.append
        changes.note_written(shard_of(UID))
        return changes, counted

    def restart(self, kept: bytes, *facts: Fact) -> list[EvacuationEnd]:
        """The ends that the next process counts, which reads this shard and these facts."""
        changes, counted = some_changes(), list[EvacuationEnd]()
        changes.count_end = counted.append
        take(changes, [kept])
        follow(changes, *facts)
        finish(changes.prune({NAMESPACE: NOW + AWAITED_FOR}.get, NOW))
        finish(changes.encode_changed(NOW))
        changes.note_written(shard_of(UID))
        return counted

    def test_counted_when_it_is_written(self) -> None:
        """An end is counted once it is written, and not before."""
        changes, counted = self.an_ended_one()
        follow(changes, a_vmi())
        assert counted == []
        for _ in range(2):
            changes.note_written(shard_of(UID))
        assert [end.outcome for end in counted] == [EvacuationOutcome.CANCELLED]

    @pytest.mark.parametrize("is_gone", [False, True], ids=["cancelled", "deleted"])
    def test_killed_before_it_is_written(self, *, is_gone: bool) -> None:
        """The next process counts an end that was not written."""
        changes, counted = self.an_ended_one()
        kept = seal(changes.entries(shard_of(UID)))
        follow(changes, a_vmi())
        assert counted == []
        assert len(self.restart(kept, *([] if is_gone else [a_vmi()]))) == 1

    def test_killed_after_it_is_written(self) -> None:
        """The next process does not count an end that was written."""
        changes, counted = self.an_ended_one()
        follow(changes, a_vmi())
        changes.note_written(shard_of(UID))
        assert len(counted) == 1
        assert self.restart(seal(changes.entries(shard_of(UID))), a_vmi()) == []

    def test_ended_after_the_entry_was_encoded(self) -> None:
        """An end that came after the content was encoded counts with the next write."""
        changes, counted = self.an_ended_one()
        put(changes.store, a_vmi())
        changes.note_written(shard_of(UID))
        assert counted == []
        finish(changes.encode_changed(NOW))
        changes.note_written(shard_of(UID))
        assert len(counted) == 1

    @pytest.mark.parametrize("is_writer", [True, False])
    def test_a_vmi_that_never_had_an_entry(self, *, is_writer: bool) -> None:
        """An evacuation that changes no entry is counted by the writer, and dropped by others."""
        changes, counted = some_changes(), list[EvacuationEnd]()
        changes.count_end = counted.append
        put(changes.store, a_vmi(evacuation_node="n1"))
        remove(changes.store, Resource.VMIS, NAMESPACE, NAME)
        finish(changes.encode_changed(NOW))
        assert changes.unwritten == []
        for may_write in (is_writer, True):
            changes.settle_ends(is_writer=may_write)
        assert [end.outcome for end in counted] == [EvacuationOutcome.VM_DELETED] * is_writer

    @pytest.mark.parametrize("is_ours", [True, False])
    def test_the_answer_to_a_write_is_lost(self, *, is_ours: bool) -> None:
        """A stored end counts if this process has written it, and not if another one has."""
        changes, counted = self.an_ended_one()
        follow(changes, a_vmi())
        changes.note_missing(shard_of(UID), NOW)
        stored = changes.entries(shard_of(UID))
        changes.writer ^= not is_ours
        finish(changes.load(shard_of(UID), stored, NOW))
        assert len(counted) == is_ours


class TestMerging:
    """A stored history and the facts that are already known are merged, in either order."""

    @pytest.mark.parametrize("late", [False, True], ids=["before-the-list", "after"])
    def test_a_request(self, *, late: bool) -> None:
        """A stored request keeps its time, and failures count even if their VMIMs are deleted."""
        before = some_changes(a_vmi(evacuation_node="n1"), *failures(range(70)))
        later = a_store(now=NOW)
        successor = pending_changes(later, WINDOW)
        later.now = NOW + 5_000
        facts: list[Fact] = [a_vmi(evacuation_node="n1"), *failures(range(68, 72))]
        for reads in (not late, late):
            if reads:
                take(successor, shards(before))
            else:
                put(later, *facts)
        marker = marker_of(later)
        assert marker.requested_at == marker_of(before.store).requested_at
        assert marker.failed_since_request() == 72
        assert len(marker.failed) == FAILURES_KEPT

    def test_nothing_new(self) -> None:
        """A stored history without news changes nothing and is not written again."""
        changes = some_changes(a_moved_vmi(evacuation_node="n1"))
        shard = shard_of(UID)
        kept = changes.entries(shard)
        changes.note_written(shard)
        notices: list[Notice] = []
        changes.store.subscribe(notices.append, *NoticeKind)
        finish(changes.merge(kept, NOW))
        finish(changes.load(shard, kept, NOW))
        assert (notices, changes.unwritten) == ([], [])


class TestUnwritten:
    """The stored history and ours are compared by content, not by bytes."""

    def test_an_equal_history_in_another_encoding(self) -> None:
        """A stored shard is up to date even if it has an old migration that we drop."""
        old = an_ended_vmim(
            uid="old", name="old", start=None, end=None, finished_at=NOW - WINDOW - 60
        )
        changes = some_changes(a_moved_vmi(), old)
        shard = shard_of(UID)
        with_it = some_changes()
        with_it.window = 2 * WINDOW
        follow(with_it, a_moved_vmi(), old)
        assert with_it.entries(shard) != changes.entries(shard)
        assert changes.unwritten_since == NOW
        finish(changes.load(shard, with_it.entries(shard), NOW))
        assert changes.unwritten_since is None

    def test_a_history_that_lacks_something(self) -> None:
        """A migration that the stored history lacks counts as unwritten since it was first seen."""
        changes = some_changes(a_moved_vmi())
        shard = shard_of(UID)
        less = some_changes(a_vmi(migration=MigrationState("m2", NOW - 20, ended=True, end=NOW)))
        finish(changes.load(shard, less.entries(shard), NOW + 5))
        assert changes.unwritten_since == NOW
        seen = {NAMESPACE: NOW - AWAITED_FOR}
        assert list(changes.find_missed(NOW - 1, seen.get, NOW + 9)) == []
        assert list(changes.find_missed(NOW, {NAMESPACE: NOW - AWAITED_FOR - 1}.get, NOW + 9)) == []
        assert list(changes.find_missed(NOW, seen.get, NOW + 9)) == [shard]

    def test_nobody_misses_a_vmi_that_is_gone(self) -> None:
        """The shard of a deleted VMI is unwritten, but `find_missed` does not return it."""
        changes = some_changes(a_moved_vmi())
        shard = shard_of(UID)
        kept = changes.entries(shard)
        finish(changes.load(shard, kept, NOW))
        remove(changes.store, Resource.VMIS, NAMESPACE, NAME)
        finish(changes.encode_changed(NOW))
        assert changes.unwritten == [shard]
        assert list(changes.find_missed(NOW, {NAMESPACE: NOW}.get, NOW)) == []


@pytest.mark.parametrize("lives", [300, pytest.param(2_500, id="soak", marks=pytest.mark.soak)])
def test_killed_anywhere(prove: Callable[[str], None], lives: int) -> None:
    """After a kill at a random point, the next process gives the same answers from then on.

    Without the stored history, many of the answers would differ.
    """
    differ_without = 0
    later = 20
    for seed in range(lives):
        life = Life(seed)
        predecessor = some_changes(*life.objects())
        for _ in range(life.rng.randrange(10, 80)):
            life.live(predecessor.store)
        finish(predecessor.encode_changed(life.now))
        kept = shards(predecessor)
        shown = life.objects()
        successor, without_history = some_changes(), some_changes()
        put(without_history.store, *shown, at=life.now)
        is_read_first = life.rng.random() < 0.5
        for reads in (is_read_first, not is_read_first):
            if reads:
                take(successor, kept, life.now)
            else:
                put(successor.store, *shown, at=life.now)
        expected = answers_of(predecessor.store, life.now)
        assert answers_of(successor.store, life.now) == expected, f"seed {seed}"
        differ_without += answers_of(without_history.store, life.now) != expected
        for _ in range(later):
            life.live(predecessor.store, successor.store)
            expected = answers_of(predecessor.store, life.now)
            assert answers_of(successor.store, life.now) == expected, f"seed {seed}, later"
    prove(
        f"{lives} lives, killed once each: {lives * (1 + later):,} comparisons, none differs;"
        f" {differ_without} lives without a stored history"
    )
    assert differ_without > lives / 4


def failures(numbers: Iterable[int]) -> list[Vmim]:
    """Failed evacuation VMIMs of n1, created one second apart."""
    return [an_attempt(n, created=NOW + n, failed_at=NOW + n + 0.5) for n in numbers]


def take(changes: PendingChanges, kept: Iterable[bytes], now: float = NOW) -> None:
    """Merge these shards into the store."""
    for raw in kept:
        finish(changes.merge(unseal(raw), now))
