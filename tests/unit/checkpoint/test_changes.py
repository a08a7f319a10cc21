"""From the store to shards and back: a process that dies anywhere has forgotten nothing."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.checkpoint.changes import AWAITED_FOR, PendingChanges
from exporter.checkpoint.format import SHARDS, shard_of
from exporter.engine.diagnosis import diagnose
from exporter.engine.evidence import FAILURES_KEPT, Marker
from exporter.engine.model import (
    Checkpoint,
    Fact,
    MigrationState,
    Outcome,
    Policy,
    Resource,
    StuckPolicy,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.rules import decide
from exporter.engine.store import Store
from tests.support.builders import NAME, NAMESPACE, NOW, UID, a_pod, a_store, a_vmi, a_vmim


WINDOW = 86_400.0
LIVES = 300


def some_changes(*facts: Fact) -> PendingChanges:
    """A changes of such a store, which it has followed."""
    changes = PendingChanges(store=a_store(read_at=NOW), window=WINDOW)
    for fact in facts:
        changes.store.put(fact)
    changes.encode_touched(NOW)
    return changes


def shards(changes: PendingChanges) -> list[bytes]:
    """Everything that it would write."""
    return [changes.seal(shard) for shard in range(SHARDS) if not changes.is_empty(shard)]


def an_heir(kept: Iterable[bytes], *facts: Fact) -> PendingChanges:
    """Another process, which read that checkpoint and then saw the cluster as it is."""
    changes = some_changes()
    take(changes, kept)
    put(changes.store, facts)
    changes.encode_touched(NOW)
    return changes


def a_moved_vmi(**overrides: Any) -> Vmi:
    """A VMI whose migration m1 has ended."""
    state = MigrationState("m1", NOW - 60, ended=True, end=NOW - 30, outcome=Outcome.SUCCEEDED)
    return a_vmi(**({"migration": state} | overrides))


class TestFollowing:
    """Only what the store calls touched is encoded, and only news is to be written."""

    def test_a_vmi_that_never_moved_takes_nothing(self) -> None:
        """There is nothing to remember of it."""
        changes = some_changes(a_vmi())
        assert (len(changes), changes.changed, changes.unwritten_since) == (0, set(), None)

    def test_news(self) -> None:
        """A migration and a marker are to be written, once."""
        changes = some_changes(a_moved_vmi())
        shard = shard_of(UID)
        assert (len(changes), changes.changed, changes.unwritten_since) == (1, {shard}, NOW)
        changes.note_written(shard)
        changes.store.put(a_moved_vmi(node="n2"))
        changes.encode_touched(NOW + 1)
        assert (changes.changed, changes.unwritten_since) == (set(), None), "nothing to remember"
        changes.store.put(a_moved_vmi(evacuation_node="n1"))
        changes.encode_touched(NOW + 2)
        assert (changes.changed, changes.unwritten_since) == ({shard}, NOW + 2)

    def test_pruned_with_the_vmi(self) -> None:
        """A VMI that goes takes its entry with it; one of the same name starts clean."""
        changes = some_changes(a_moved_vmi())
        changes.store.remove(Resource.VMIS, NAMESPACE, NAME)
        changes.encode_touched(NOW)
        assert len(changes) == 0
        changes.store.put(a_moved_vmi())
        changes.store.put(a_vmi(uid="another"))
        changes.encode_touched(NOW)
        assert len(changes) == 0

    def test_size(self) -> None:
        """The size is what the entries take."""
        assert some_changes().size == 0
        changes = some_changes(a_moved_vmi())
        alone = changes.size
        assert alone > 30
        changes.store.put(a_moved_vmi(name="b", uid="b"))
        changes.encode_touched(NOW)
        assert changes.size > alone
        changes.store.remove(Resource.VMIS, NAMESPACE, "b")
        changes.encode_touched(NOW)
        assert changes.size == alone

    def test_many_vmis_are_encoded_in_slices(self) -> None:
        """Each call encodes at most `most` VMIs, and returns whether some are left."""
        changes = some_changes()
        for number in range(5):
            changes.store.put(a_moved_vmi(name=f"v{number}", uid=f"u{number}"))
        left = [changes.encode_touched(NOW, most=2) for _ in range(3)]

        assert left == [True, True, False]
        assert len(changes) == 5


class TestVmisNotSeen:
    """What is known of a VMI that has not been seen is kept until it is known to be gone."""

    KEPT = shards(some_changes(a_moved_vmi()))

    def test_kept_while_its_namespace_is_not_watched(self) -> None:
        """Another replica, or we tomorrow, may watch it."""
        heir = an_heir(self.KEPT)
        heir.prune(lambda _: None, NOW)
        heir.prune(lambda _: None, NOW + 1e6)
        heir.encode_touched(NOW + 1e6)
        assert shards(heir) == self.KEPT
        assert heir.awaits_vmis

    def test_dropped_once_its_namespace_was_seen_whole(self) -> None:
        """Heard of the cluster for a minute since, and it is not there."""
        heir = an_heir(self.KEPT)
        heir.prune({NAMESPACE: NOW}.get, NOW)
        heir.prune({NAMESPACE: NOW + AWAITED_FOR - 1}.get, NOW + 1e6)
        assert heir.awaits_vmis
        heir.prune({NAMESPACE: NOW + AWAITED_FOR}.get, NOW + 1e6)
        heir.prune({NAMESPACE: NOW + AWAITED_FOR}.get, NOW + 1e6)
        heir.encode_touched(NOW)
        assert (heir.awaits_vmis, len(heir)) == (False, 0)

    def test_dropped_where_the_writer_dropped_it(self) -> None:
        """Who writes has seen it go."""
        heir = an_heir(self.KEPT)
        heir.keep_only((shard_of(UID) + 1) % SHARDS, set())
        heir.keep_only(shard_of(UID), {UID})
        assert heir.store.recalled()
        heir.keep_only(shard_of(UID), set())
        heir.encode_touched(NOW)
        assert len(heir) == 0

    def test_a_vmi_that_is_seen_is_never_dropped(self) -> None:
        """Whatever another wrote: our own eyes count for more."""
        heir = an_heir(self.KEPT, a_vmi())
        heir.keep_only(shard_of(UID), set())
        heir.prune({NAMESPACE: NOW + 1e6}.get, NOW)
        heir.encode_touched(NOW)
        assert shards(heir) == self.KEPT


class TestRecalling:
    """What a checkpoint says is joined with what is known, in either order."""

    @pytest.mark.parametrize("late", [False, True], ids=["before-the-list", "after"])
    def test_migrations(self, *, late: bool) -> None:
        """Of two processes each knew one migration."""
        kept = shards(some_changes(a_moved_vmi()))
        other = a_vmi(migration=MigrationState("m2", NOW - 20, ended=True, end=NOW - 10))
        heir = an_heir([] if late else kept, other)
        if late:
            take(heir, kept)
        evidence = heir.store.evidence(NAMESPACE, NAME)
        assert evidence is not None
        assert set(evidence.history.records()) == {"m1", "m2"}

    def test_a_vmim_recalled_is_bound(self) -> None:
        """It was this VMI's migration in an earlier life, whatever its creation says."""
        heir = an_heir(
            shards(some_changes(a_moved_vmi())),
            a_vmi(created=NOW),
            a_vmim(created=NOW - 900, phase="Running", handed_off=True),
        )
        evidence = heir.store.evidence(NAMESPACE, NAME)
        assert evidence is not None
        assert evidence.unfinished() is not None

    @pytest.mark.parametrize("late", [False, True], ids=["before-the-list", "after"])
    def test_a_request(self, *, late: bool) -> None:
        """It never moves later, and the failures that KubeVirt deleted are counted on."""
        before = some_changes(a_vmi(evacuation_node="n1"), *failures(range(70)))
        later = a_store(read_at=NOW)
        heir = PendingChanges(later, WINDOW)
        later.read_at = NOW + 5_000
        facts: list[Fact] = [a_vmi(evacuation_node="n1"), *failures(range(68, 72))]
        for reads in (not late, late):
            if reads:
                take(heir, shards(before))
            else:
                put(later, facts)
        marker = evacuation(later)
        assert marker.requested_at == evacuation(before.store).requested_at
        assert marker.failed_since_request() == 72
        assert len(marker.failed) == FAILURES_KEPT

    @pytest.mark.parametrize(
        "now",
        [
            pytest.param(a_vmi(evacuation_node="n2"), id="another-node"),
            pytest.param(
                a_vmi(evacuation_node="n1", eviction_requested_at=NOW + 4_000), id="asked-anew"
            ),
            pytest.param(
                a_vmi(
                    evacuation_node="n1",
                    migration=MigrationState(
                        "m9", NOW + 50, ended=True, end=NOW + 90, outcome=Outcome.SUCCEEDED
                    ),
                ),
                id="moved-and-back",
            ),
        ],
    )
    def test_another_evacuation(self, now: Vmi) -> None:
        """What failed in an evacuation that is over is none of the next one's attempts."""
        before = some_changes(a_vmi(evacuation_node="n1"), *failures(range(4)))
        later = a_store(read_at=NOW)
        heir = PendingChanges(later, WINDOW)
        later.read_at = NOW + 5_000
        take(heir, shards(before))
        later.put(now)
        assert evacuation(later).failed_since_request() == 0
        assert evacuation(later).requested_at > NOW

    def test_nothing_new(self) -> None:
        """What is known already changes no answer, and is not written."""
        changes = some_changes(a_moved_vmi(evacuation_node="n1"))
        changes.note_written(shard_of(UID))
        revision = changes.store.revision
        changes.load_shard(changes.seal(shard_of(UID)))
        changes.encode_touched(NOW)
        assert (changes.store.revision, changes.changed) == (revision, set())


class Life:
    """One VM's life as a cluster shows it: what exists now, and every change as a fact.

    KubeVirt keeps five finished VMIMs and empties `migrationState` at each hand-off.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = NOW
        self.vmi = a_vmi(created=NOW - 100)
        self.vmims: dict[str, Vmim] = {}
        self.made = 0

    def objects(self) -> list[Fact]:
        """What a list would show, in any order."""
        shown: list[Fact] = [self.vmi, a_pod(), *self.vmims.values()]
        self.rng.shuffle(shown)
        return shown

    def live(self, *stores: Store) -> None:
        """A step of this life, of which these hear."""
        self.now += self.rng.choice([1.0, 30.0, 900.0])
        for store in stores:
            store.read_at = self.now
        for fact in self.step():
            for store in stores:
                store.put(fact)
        finished = [vmim for vmim in self.vmims.values() if vmim.finished]
        for vmim in finished[:-5]:
            del self.vmims[vmim.name]
            for store in stores:
                store.remove(Resource.VMIMS, vmim.namespace, vmim.name, vmim.uid)

    def step(self) -> list[Fact]:
        """What changes."""
        open_one = next((v for v in self.vmims.values() if not v.finished), None)
        if open_one is None:
            return self.begin()
        if not open_one.handed_off:
            if self.rng.random() < 0.3:
                return [self.change(open_one, **self.ending("Failed", Outcome.FAILED))]
            self.vmi = replace(self.vmi, migration=MigrationState(uid=open_one.uid))
            return [self.change(open_one, phase="Scheduled", handed_off=True), self.vmi]
        state = self.vmi.migration
        assert state is not None
        if state.start is None:
            self.vmi = replace(self.vmi, migration=replace(state, start=self.now))
            return [self.vmi]
        good = self.rng.random() < 0.6
        outcome = Outcome.SUCCEEDED if good else Outcome.FAILED
        ended = replace(state, ended=True, end=self.now, outcome=outcome)
        self.vmi = replace(self.vmi, migration=ended, evacuation_node="" if good else self.marked)
        told = {"start": ended.start, "end": ended.end}
        final = self.ending("Succeeded" if good else "Failed", outcome)
        return [self.vmi, self.change(open_one, **final, **told)]

    @property
    def marked(self) -> str:
        """The node that it is to leave, if any."""
        return self.vmi.evacuation_node

    def begin(self) -> list[Fact]:
        """Ask for an evacuation, cancel it, or make the next attempt at it or at a migration."""
        choice = self.rng.random()
        if choice < 0.15:
            self.vmi = replace(self.vmi, evacuation_node="" if self.marked else "n1")
            return [self.vmi]
        self.made += 1
        evacuates = {"evacuates": self.marked, "trigger": Trigger.EVACUATION} if self.marked else {}
        made = a_vmim(name=f"m{self.made}", uid=f"m{self.made}", created=self.now, **evacuates)
        self.vmims[made.name] = made
        return [made]

    def ending(self, phase: str, outcome: Outcome) -> dict[str, Any]:
        """The fields of a VMIM that ends now."""
        return {"phase": phase, "finished": True, "finished_at": self.now, "outcome": outcome}

    def change(self, vmim: Vmim, **fields: Any) -> Vmim:
        """A VMIM as it is now."""
        changed = self.vmims[vmim.name] = replace(vmim, **fields)
        return changed


def told_by(store: Store, now: float) -> dict[str, object]:
    """Everything that the API says of the one VMI."""
    evidence = store.evidence(NAMESPACE, NAME)
    assert evidence is not None
    diagnosis = diagnose(evidence, StuckPolicy(), None, now)
    return {
        **{one: decide(evidence, Policy(), now, checkpoint=one) for one in Checkpoint},
        "evacuation": diagnosis
        and (diagnosis.requested_at, diagnosis.failed_attempts, diagnosis.stuck, diagnosis.state),
    }


def test_killed_anywhere(prove: Callable[[str], None]) -> None:
    """At random points of random lives an heir takes over: it says what its forebear says.

    And goes on to say so, whatever comes after. Without the checkpoint it would often not.
    """
    differ_without = 0
    for seed in range(LIVES):
        life = Life(seed)
        forebear = some_changes(*life.objects())
        for _ in range(life.rng.randrange(10, 80)):
            life.live(forebear.store)
        forebear.encode_touched(life.now)
        kept = shards(forebear)
        shown = life.objects()
        heir, stranger = some_changes(), some_changes()
        for changes in (heir, stranger):
            changes.store.read_at = life.now
        put(stranger.store, shown)
        is_read_first = life.rng.random() < 0.5
        for reads in (is_read_first, not is_read_first):
            if reads:
                take(heir, kept)
            else:
                put(heir.store, shown)
        expected = told_by(forebear.store, life.now)
        assert told_by(heir.store, life.now) == expected, f"seed {seed}"
        differ_without += told_by(stranger.store, life.now) != expected
        for _ in range(20):
            life.live(forebear.store, heir.store)
            expected = told_by(forebear.store, life.now)
            assert told_by(heir.store, life.now) == expected, f"seed {seed}, later"
    prove(f"{LIVES} lives, killed once each: none differs; {differ_without} without a checkpoint")
    assert differ_without > LIVES / 4


def failures(numbers: Iterable[int]) -> list[Vmim]:
    """Failed evacuations off n1, a second apart."""
    return [
        a_vmim(
            name=f"e{n}",
            uid=f"e{n}",
            created=NOW + n,
            evacuates="n1",
            trigger=Trigger.EVACUATION,
            phase="Failed",
            finished=True,
            finished_at=NOW + n + 0.5,
            outcome=Outcome.FAILED,
        )
        for n in numbers
    ]


def take(changes: PendingChanges, kept: Iterable[bytes]) -> None:
    """Read these shards."""
    for raw in kept:
        changes.load_shard(raw)


def put(store: Store, facts: Iterable[Fact]) -> None:
    """Hear of these."""
    for fact in facts:
        store.put(fact)


def evacuation(store: Store) -> Marker:
    """The marker of the one VMI, which must be there."""
    evidence = store.evidence(NAMESPACE, NAME)
    assert evidence is not None
    assert evidence.marker is not None
    return evidence.marker
