"""What all VMIs come to: the index says what a look at every VMI would."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.cooldown import Cooldown, measure_cooldown
from exporter.engine.evidence import Evidence, Remembered
from exporter.engine.history import Migration
from exporter.engine.model import (
    ALL_ALIVE,
    CLOCK_SKEW,
    CLUSTER_RESOURCES,
    Checkpoint,
    DeadResources,
    Fact,
    Instant,
    MigrationState,
    Outcome,
    Policy,
    Reason,
    Resource,
    Vmi,
)
from exporter.engine.rules import decide
from exporter.engine.store import Store
from exporter.engine.verdict_index import ALLOWED, SPARE, Cooling, VerdictIndex, VerdictSummary
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
)
from tests.support.sizes import soaked


POLICY = a_policy()
SILENT = DeadResources(frozenset(CLUSTER_RESOURCES))


def a_memory(uid: str, end: Instant) -> Remembered:
    """What a checkpoint tells of one migration that took a minute."""
    migration = Migration(start=end - 60.0, end=end, handed_off=True)
    return Remembered(uid=uid, namespace=NAMESPACE, migrations={"old": migration})


def told(
    summary: VerdictSummary,
) -> tuple[dict[tuple[str, str], int], dict[str, tuple[Vmi, Cooldown]]]:
    """What a summary says, whatever the order in which it says it."""
    cooling = {one.vmi.name: (one.vmi, one.cooldown) for one in summary.cooling}
    assert len(cooling) == len(summary.cooling)
    return dict(summary.verdicts), cooling


def looked(
    store: Store, policy: Policy, now: Instant, *, dead: DeadResources = ALL_ALIVE
) -> VerdictSummary:
    """The summary by a look at every VMI, for which nothing that was kept is used."""
    verdicts: Counter[tuple[str, str]] = Counter()
    cooling = []
    for known in store.all_evidence():
        evidence = replace(known, kept=None)
        if evidence.vmi.finished:
            continue
        vmi = evidence.vmi
        verdict = decide(evidence, policy, now, dead=dead.of(vmi.namespace))
        verdicts[verdict.reason or ALLOWED, vmi.node] += 1
        cooldown = measure_cooldown(evidence, policy, now)
        if cooldown is not None and cooldown.blocks:
            cooling.append(Cooling(vmi, cooldown))
    return VerdictSummary(verdicts, tuple(cooling))


# --- single cases


def test_a_census() -> None:
    """VMIs are counted by node and verdict, and those whose cooldown holds are named."""
    store = a_store(
        a_vmi(),
        a_vmi(name="db2", uid="2"),
        a_vmi(name="db3", uid="3", migration=a_running_state()),
        a_vmi(name="db4", uid="4", node="n2", migration=a_state()),
    )
    summary = VerdictIndex(store, POLICY).read(NOW, dead=ALL_ALIVE)
    assert summary.verdicts == {
        (ALLOWED, "n1"): 2,
        (Reason.MIGRATION_IN_PROGRESS, "n1"): 1,
        (Reason.COOLDOWN, "n2"): 1,
    }
    assert [one.vmi.name for one in summary.cooling] == ["db4"]
    assert summary.cooling[0].cooldown.not_before == NOW + 300.0


def test_a_census_stays_as_it_was() -> None:
    """What comes later does not change a summary that was read."""
    store = a_store(a_vmi(migration=a_state()))
    index = VerdictIndex(store, POLICY)
    summary = index.read(NOW, dead=ALL_ALIVE)
    before = told(summary)
    store.remove(Resource.VMIS, NAMESPACE, NAME, UID)
    store.put(a_vmi(name="db2", uid="2", node="n9"))
    assert told(index.read(NOW + 5000.0, dead=ALL_ALIVE)) != before
    assert told(summary) == before


def test_the_clock_alone_ends_a_cooldown() -> None:
    """No news is needed: it holds to the last instant and not in the next."""
    index = VerdictIndex(a_store(a_vmi(migration=a_state())), POLICY)
    for now, cools in ((NOW, True), (NOW + 299.0, True), (NOW + 300.0, False), (NOW, True)):
        summary = index.read(now, dead=ALL_ALIVE)
        assert bool(summary.cooling) is cools
        assert summary.verdicts == {(Reason.COOLDOWN if cools else ALLOWED, "n1"): 1}


def test_silence_is_heard_and_its_end() -> None:
    """While nothing is heard of the API server only cooldowns are counted as blocked."""
    store = a_store(
        a_vmi(migration=a_running_state()), a_vmi(name="db2", uid="2", migration=a_state())
    )
    index = VerdictIndex(store, POLICY)
    for dead in (ALL_ALIVE, SILENT, ALL_ALIVE):
        verdicts = index.read(NOW, dead=dead).verdicts
        running = ALLOWED if dead else Reason.MIGRATION_IN_PROGRESS
        assert verdicts == {(running, "n1"): 1, (Reason.COOLDOWN, "n1"): 1}


def test_silence_in_one_namespace_is_counted_there_alone() -> None:
    """While VMIs are dead in one namespace, its running migration blocks no more, others do."""
    running = a_running_state()
    store = a_store(
        a_vmi(node="n1", migration=running),
        a_vmi(namespace="lost", node="n2", uid="2", migration=running),
    )
    index = VerdictIndex(store, POLICY)
    lost = DeadResources(in_namespace={"lost": frozenset({Resource.VMIS})})
    for dead in (ALL_ALIVE, lost, ALL_ALIVE):
        there = ALLOWED if dead else Reason.MIGRATION_IN_PROGRESS
        assert index.read(NOW, dead=dead).verdicts == {
            (Reason.MIGRATION_IN_PROGRESS, "n1"): 1,
            (there, "n2"): 1,
        }


def test_an_end_ahead_of_the_clock() -> None:
    """It is believed as soon as it lies near, and then moves with the clock."""
    end = NOW + CLOCK_SKEW + 100.0
    index = VerdictIndex(a_store(a_vmi(migration=a_state(end=end))), POLICY)
    waits = [
        [one.cooldown.not_before - now for one in index.read(now, dead=ALL_ALIVE).cooling]
        for now in (NOW, NOW + 150.0, NOW + 160.0, end + 1.0, end + 5000.0)
    ]
    duration = end - (NOW - 660.0)
    assert waits == [[], [duration], [duration], [duration - 1.0], []]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda store: store.put(a_vmi(node="n2", migration=a_state())), id="vmi"),
        pytest.param(lambda store: store.remove(Resource.VMIS, NAMESPACE, NAME), id="vmi-gone"),
        pytest.param(lambda store: store.put(a_vmi(phase="Failed")), id="vmi-ended"),
        pytest.param(lambda store: store.put(a_vmim(uid="m2")), id="vmim"),
        pytest.param(lambda store: store.remove(Resource.VMIMS, NAMESPACE, "m3"), id="vmim-gone"),
        pytest.param(lambda store: store.put(a_pod(eviction_in_progress=True)), id="pod"),
        pytest.param(lambda store: store.put(a_pod(vmi_uid="other")), id="another-vmis-pod"),
        pytest.param(
            lambda store: store.remove(Resource.PODS, NAMESPACE, "virt-launcher-db1-x"),
            id="pod-gone",
        ),
        pytest.param(lambda store: store.recall(a_memory("2", NOW - 700.0)), id="recalled"),
        pytest.param(lambda store: setattr(store, "vmims_seen", False), id="vmims-unseen"),
        pytest.param(lambda store: setattr(store, "pods_seen", False), id="pods-unseen"),
        pytest.param(
            lambda store: setattr(store, "blind", {Resource.PODS: frozenset({NAMESPACE})}),
            id="blind",
        ),
    ],
)
def test_every_kind_of_news_is_heard(change: Callable[[Store], None]) -> None:
    """Whatever changes the summary changes what the index says."""
    store = a_store(
        a_vmi(evacuation_node="n1"),
        a_pod(),
        a_vmi(name="db2", uid="2", migration=a_state()),
        a_vmi(name="db3", uid="3"),
        a_vmim(name="m3", uid="m3", vmi_name="db3"),
    )
    index = VerdictIndex(store, POLICY)
    before = told(index.read(NOW, dead=ALL_ALIVE))
    change(store)
    after = told(index.read(NOW, dead=ALL_ALIVE))
    assert after == told(looked(store, POLICY, NOW))
    assert after != before


def test_catching_up_is_bounded() -> None:
    """So many VMIs are looked at as was asked for, until none is left."""
    store = a_store(*(a_vmi(name=f"db{i}", uid=f"{i}", migration=a_state()) for i in range(5)))
    index = VerdictIndex(store, POLICY)
    left = [index.catch_up(NOW, dead=ALL_ALIVE, most=2) for _ in range(4)]
    assert left == [True, True, False, False]
    assert sum(evidence.kept is not None for evidence in store.all_evidence()) == 5


def test_catching_up_ends_where_ends_lie_ahead() -> None:
    """VMIs that are looked at in every summary do not hold up who catches up."""
    ahead = a_state(end=NOW + 60.0)
    store = a_store(*(a_vmi(name=f"db{i}", uid=f"{i}", migration=ahead) for i in range(5)))
    index = VerdictIndex(store, POLICY)
    left = [index.catch_up(NOW + i, dead=ALL_ALIVE, most=2) for i in range(3)]
    assert left == [True, True, False]
    assert told(index.read(NOW + 9, dead=ALL_ALIVE)) == told(looked(store, POLICY, NOW + 9))


def test_what_was_replaced_is_not_kept_for_ever() -> None:
    """A VMI that migrates again and again leaves no trail of ends to come, nor of its nodes."""
    store = a_store()
    index = VerdictIndex(store, POLICY)
    for i in range(3 * SPARE):
        state = a_state(uid=f"m{i}", end=NOW - 600.0 + i / SPARE)
        store.put(a_vmi(node=f"node-{i}", migration=state))
        index.read(NOW, dead=ALL_ALIVE)
    assert len(index) <= SPARE + 5


def test_of_a_vmi_that_is_gone_nothing_is_kept() -> None:
    """Not even where it was looked at in every summary."""
    store = a_store(a_vmi(migration=a_state(end=NOW + 60.0)))
    index = VerdictIndex(store, POLICY)
    index.read(NOW, dead=ALL_ALIVE)
    assert len(index) > 0
    store.remove(Resource.VMIS, NAMESPACE, NAME, UID)
    assert len(index) == 0


# --- any sequence of news, of the clock and of looks


NAMES = ("db1", "db2", "db3")
OFFSETS = (-90_000.0, -5_000.0, -880.0, -600.0, -1.0, 0.0, 10.0, 250.0, 350.0, 2_000.0)
STEPS = (-50_000.0, -60.0, -1.0, 0.0, 1.0, 20.0, 60.0, 301.0, 900.0, 7_000.0, 86_400.0)


@dataclass(frozen=True)
class Gone:
    """A deletion."""

    resource: Resource
    name: str


@dataclass(frozen=True)
class Unreadable:
    """An object that cannot be read any more."""

    resource: Resource
    name: str


@dataclass(frozen=True)
class Pause:
    """The clock goes on, or back; resources are dead or not; so many VMIs are looked at."""

    seconds: float
    dead: DeadResources
    looks: int


@dataclass(frozen=True)
class Sight:
    """What may be seen."""

    vmims: bool
    pods: bool
    blind: bool


Step: TypeAlias = Fact | Remembered | Gone | Unreadable | Pause | Sight

instants = st.sampled_from(OFFSETS).map(lambda offset: NOW + offset)
states = st.builds(
    MigrationState,
    uid=st.sampled_from(("", "m1", "m2", "m3")),
    start=st.none() | instants,
    ended=st.booleans(),
    end=st.none() | instants,
    outcome=st.sampled_from(Outcome),
)
vmis = st.builds(
    lambda name, life, **fields: a_vmi(name=name, uid=f"{name}-{life}", **fields),
    st.sampled_from(NAMES),
    st.sampled_from((1, 1, 1, 2)),
    node=st.sampled_from(("n1", "n2", "")),
    evacuation_node=st.sampled_from(("", "n1")),
    migration=st.none() | states,
    phase=st.sampled_from(("Running", "Running", "Failed")),
)
vmims = st.builds(
    lambda number, of, **fields: a_vmim(
        name=f"mig-{number}", uid=f"m{number}", vmi_name=of, **fields
    ),
    st.integers(1, 3),
    st.sampled_from(NAMES),
    phase=st.sampled_from(("Pending", "Running", "Failed")),
    finished=st.booleans(),
    finished_at=st.none() | instants,
    handed_off=st.booleans(),
    created=st.none() | instants,
    end=st.none() | instants,
    outcome=st.sampled_from(Outcome),
)
pods = st.builds(
    lambda name, **fields: a_pod(name=f"pod-{name}", vmi_uid=f"{name}-1", **fields),
    st.sampled_from(NAMES),
    node=st.sampled_from(("n1", "n2")),
    eviction_in_progress=st.booleans(),
)
recollections = st.builds(a_memory, st.sampled_from(NAMES).map("{}-1".format), instants)
objects = st.one_of(
    st.tuples(st.just(Resource.VMIS), st.sampled_from(NAMES)),
    st.tuples(st.just(Resource.VMIMS), st.sampled_from(("mig-1", "mig-2", "mig-3"))),
    st.tuples(st.just(Resource.PODS), st.sampled_from(NAMES).map("pod-{}".format)),
)
deletions = objects.map(lambda one: Gone(*one))
refusals = objects.map(lambda one: Unreadable(*one))
dead_sets = st.frozensets(st.sampled_from(CLUSTER_RESOURCES))
deaths = st.just(ALL_ALIVE) | st.builds(
    DeadResources, dead_sets, st.dictionaries(st.just(NAMESPACE), dead_sets)
)
pauses = st.builds(Pause, st.sampled_from(STEPS), deaths, st.integers(0, 2))
sights = st.builds(Sight, st.booleans(), st.booleans(), st.booleans())
lives = st.lists(
    st.one_of(vmis, vmis, vmims, pods, recollections, deletions, refusals, pauses, pauses, sights),
    max_size=40,
)


@dataclass
class Play:
    """A store with its index, the clock and what is dead."""

    policy: Policy
    store: Store = field(default_factory=lambda: a_store(read_at=NOW))
    now: Instant = NOW
    dead: DeadResources = ALL_ALIVE
    index: VerdictIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = VerdictIndex(self.store, self.policy)

    def step(self, step: Step) -> None:
        """One thing happens."""
        match step:
            case Gone():
                self.store.remove(step.resource, NAMESPACE, step.name)
            case Unreadable():
                self.store.note_refused(step.resource, NAMESPACE, step.name)
            case Sight():
                self.store.vmims_seen, self.store.pods_seen = step.vmims, step.pods
                blind = frozenset({NAMESPACE})
                self.store.blind = {Resource.PODS: blind} if step.blind else {}
            case Remembered():
                self.store.recall(step)
            case Pause():
                self.now += step.seconds
                self.store.read_at = self.now
                self.dead = step.dead
                if step.looks:
                    self.index.catch_up(self.now, dead=self.dead, most=step.looks)
            case _:
                self.store.put(step)


def play(steps: Iterable[Step], policy: Policy, *, asking: bool) -> None:
    """After these steps (`asking`: and after each of them) the index says what a look does."""
    played = Play(policy)
    for step in steps:
        played.step(step)
        if asking:
            check(played)
    check(played)


def check(played: Play) -> None:
    """The index says what a look at every VMI says, and finds who is not plainly allowed."""
    now, dead = played.now, played.dead
    loud = played.index.find_blocked(now, dead=dead)
    summary = played.index.read(now, dead=dead)
    assert told(summary) == told(looked(played.store, played.policy, now, dead=dead))
    for evidence in played.store.all_evidence():
        if (evidence.vmi.namespace, evidence.vmi.name) not in loud:
            assert is_plain(replace(evidence, kept=None), played.policy, now, dead=dead)


def is_plain(evidence: Evidence, policy: Policy, now: Instant, *, dead: DeadResources) -> bool:
    """Whether a VMI is allowed at both checkpoints, now and whenever the clock alone moves on."""
    here = dead.of(evidence.vmi.namespace)
    return not any(
        decide(evidence, policy, now + later, checkpoint=checkpoint, dead=here).reason
        for later in (0.0, 1.0, 29.0, 31.0, 100.0, 1000.0, 86_400.0, 1e6)
        for checkpoint in (None, *Checkpoint)
    )


policies = st.builds(
    a_policy,
    migration_history_window=st.sampled_from((0.0, 120.0, 86_400.0)),
    count_failed_migrations=st.booleans(),
    guard_pending_migrations=st.booleans(),
    guard_evacuations=st.booleans(),
)


@soaked(50_000)
@given(steps=lives, policy=policies, asking=st.booleans())
def test_the_register_says_what_a_look_at_every_vmi_says(
    steps: list[Step], policy: Policy, *, asking: bool
) -> None:
    """Whatever is heard, whichever way the clock goes, however often it is asked in between."""
    play(steps, policy, asking=asking)
