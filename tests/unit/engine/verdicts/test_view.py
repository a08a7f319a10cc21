"""The verdict view equals newly computed verdicts of every VMI."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.facts.changes import Change, Observed, Removed, Unreadable
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    CLUSTER_RESOURCES,
    Checkpoint,
    Instant,
    KubeVirtSettings,
    MigrationState,
    Outcome,
    Resource,
    Seconds,
    Vmi,
)
from exporter.engine.facts.policy import Override, Policy, Reason
from exporter.engine.facts.trust import NamespaceTrust, Trust
from exporter.engine.verdicts.cooldown import Cooldown, measure_cooldown
from exporter.engine.verdicts.expiries import SPARE
from exporter.engine.verdicts.foreseen import BlockLabels, foresee_blocks
from exporter.engine.verdicts.view import ALLOWED, Tally, Verdicts
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
    an_ended_vmim,
)
from tests.support.sizes import soaked
from tests.support.stores import ClockedStore, a_trust, a_verdict_view, some_verdicts
from tests.support.verdicts import decide


POLICY = a_policy()
SILENT = a_trust(*CLUSTER_RESOURCES)


def count_kept(view: Verdicts) -> int:
    """The number of entries in all containers of a view."""
    own = vars(view)
    values = (*own.values(), *vars(own["_expiries"]).values())
    return sum(len(value) for value in values if isinstance(value, dict | list | set))


def is_behind(view: Verdicts, now: Instant) -> bool:
    """Evaluate two outdated VMIs; whether some are left."""
    view.advance(now, Trust(), most=2)
    return view.is_behind


def summarized(
    view: Verdicts, now: Instant = NOW, trust: Trust | None = None
) -> tuple[Tally, dict[str, tuple[Vmi, Cooldown | None]]]:
    """The counts by verdict and node, and the cooling VMIs by name, at `now`."""
    view.advance(now, trust or Trust())
    summary = view.summarize()
    cooling = {e.evidence.vmi.name: (e.evidence.vmi, e.cooldown) for e in summary.cooling}
    assert len(cooling) == len(summary.cooling)
    return dict(summary.verdicts), cooling


def decided(
    store: ClockedStore, policy: Policy, now: Instant = NOW, trust: Trust | None = None
) -> tuple[Tally, dict[str, tuple[Vmi, Cooldown | None]]]:
    """What `summarized` returns, computed from all VMIs without a view."""
    verdicts: Counter[tuple[str, str]] = Counter()
    cooling: dict[str, tuple[Vmi, Cooldown | None]] = {}
    for evidence in store.all_evidence(trust):
        vmi = evidence.vmi
        if vmi.finished:
            continue
        verdict = decide(evidence, policy, now)
        verdicts[verdict.reason or ALLOWED, vmi.node] += 1
        cooldown = measure_cooldown(evidence, policy, now)
        if cooldown is not None and cooldown.blocks:
            cooling[vmi.name] = (vmi, cooldown)
    return dict(verdicts), cooling


# --- single cases


@pytest.mark.parametrize(("ahead", "moves"), [(0.0, False), (1.0, True), (CLOCK_SKEW + 1, False)])
def test_an_entry_moves_while_an_end_lies_a_little_ahead(ahead: Seconds, *, moves: bool) -> None:
    """While a VMI's last end lies a little ahead of the clock, its entry changes with the clock."""
    view = some_verdicts(a_store(a_vmi(migration=a_state(end=NOW + ahead))), POLICY)
    assert (view.revision, view.moves) == (0, False)
    summarized(view)
    assert view.moves is moves


def test_a_view_is_read_as_of_an_instant() -> None:
    """`VerdictView.read` moves to the instant, and by default evaluates no VMI."""
    view = a_verdict_view(a_store(a_vmi(migration=a_state())), POLICY)
    assert [view.read(NOW, Trust(), most=most).is_behind for most in (0, 1)] == [True, False]
    for now, is_blocked in ((NOW, True), (NOW + 300.0, False)):
        assert bool([*view.read(now, Trust()).list_blocked()]) is is_blocked
    view = a_verdict_view(a_store(a_vmi(migration=a_state())), POLICY)
    assert view.read(NOW, Trust()).is_behind


def test_the_next_change_is_the_earliest_expiry() -> None:
    """`changes_at` is the end of the cooldown that ends first."""
    store = a_store()
    view = some_verdicts(store, POLICY)
    for minute in (1, 9, 3, 8):
        end = NOW - 60.0 * minute
        store.put(a_vmi(name=f"db{minute}", uid=f"u{minute}", migration=a_state(end=end)))
        view.advance(NOW, Trust())
        cooling = view.summarize().cooling
        assert view.changes_at() == min(entry.until for entry in cooling)


def test_an_unsettled_vmi_is_listed_at_once() -> None:
    """The list has a VMI that has changed since the last evaluation."""
    store = a_store(a_vmi())
    view = some_verdicts(store, POLICY)
    assert view.list_unsettled() == []
    store.put(a_vmi(evacuation_node="n1"))
    assert [evidence.vmi.evacuation_node for evidence in view.list_unsettled()] == ["n1"]


def test_a_vmi_counts_once_by_its_first_reason() -> None:
    """A VMI that is blocked at both checkpoints counts once, for `filter`."""
    store = a_store(
        a_vmi(migration=a_state()), a_vmim(), a_vmi(name="db2", uid="2", migration=a_state())
    )
    view = some_verdicts(store, POLICY)
    view.advance(NOW, Trust())
    assert view.summarize().count_by_reason() == {
        Reason.MIGRATION_IN_PROGRESS: 1,
        Reason.COOLDOWN: 1,
    }


def test_the_blocks_that_may_be_counted_soon() -> None:
    """A VMI's blocks at both checkpoints are foreseen, and those that follow a migration."""
    store = a_store(a_vmi(migration=a_state()))
    view = some_verdicts(store, POLICY)

    def foreseen() -> dict[str, set[Reason]]:
        view.advance(NOW, Trust())
        labels = view.summarize().foreseen
        assert {namespace for *_, namespace in labels} <= {NAMESPACE}
        nodes = {node for _, node, _ in labels}
        return {at: {reason for reason, node, _ in labels if node == at} for at in nodes}

    assert foreseen() == {"n1": {Reason.COOLDOWN}}
    store.put(a_vmim())
    moves = {Reason.MIGRATION_IN_PROGRESS, Reason.COOLDOWN}
    store.put(a_pod(name="ended", uid="ended", node="n3", phase="Failed"))
    store.put(a_pod(name="unscheduled", uid="unscheduled", node=""))
    assert foreseen() == {"n1": moves}
    store.put(a_vmi(migration=a_running_state(target_node="n2")))
    assert foreseen() == {"n1": moves, "n2": moves}
    store.put(a_vmi(evacuation_node="n1"))
    store.remove(Resource.VMIMS, NAMESPACE, "mig-1")
    assert foreseen() == {"n1": {*moves, Reason.EVACUATION_IN_PROGRESS}}
    store.put(a_vmi(phase="Succeeded", evacuation_node="n1", migration=a_running_state()))
    assert foreseen() == {}


def test_a_census_stays_as_it_was() -> None:
    """A summary does not change after it was read."""
    store = a_store(a_vmi(migration=a_state()))
    view = some_verdicts(store, POLICY)
    view.advance(NOW, Trust())
    summary = view.summarize()
    verdicts, cooling = dict(summary.verdicts), list(summary.cooling)
    store.remove(Resource.VMIS, NAMESPACE, NAME, UID)
    store.put(a_vmi(name="db2", uid="2", node="n9"))
    assert summarized(view, NOW + 5000.0)[0] != verdicts
    assert (dict(summary.verdicts), list(summary.cooling)) == (verdicts, cooling)


def test_the_clock_alone_ends_a_cooldown() -> None:
    """A cooldown ends when its time has passed, without an event."""
    view = some_verdicts(a_store(a_vmi(migration=a_state())), POLICY)
    for now, cools in ((NOW, True), (NOW + 299.0, True), (NOW + 300.0, False), (NOW, True)):
        verdicts, cooling = summarized(view, now)
        assert bool(cooling) is cools
        assert verdicts == {(Reason.COOLDOWN if cools else ALLOWED, "n1"): 1}


def test_silence_in_one_namespace_is_counted_there_alone() -> None:
    """A dead watch in one namespace does not change the counts of other namespaces."""
    running = a_running_state()
    store = a_store(
        a_vmi(node="n1", migration=running),
        a_vmi(namespace="lost", node="n2", uid="2", migration=running),
    )
    view = some_verdicts(store, POLICY)
    lost = Trust(in_namespace={"lost": NamespaceTrust(dead=frozenset({Resource.VMIS}))})
    for trust in (Trust(), lost, Trust()):
        there = ALLOWED if trust is lost else Reason.MIGRATION_IN_PROGRESS
        assert summarized(view, trust=trust)[0] == {
            (Reason.MIGRATION_IN_PROGRESS, "n1"): 1,
            (there, "n2"): 1,
        }


def test_catching_up_is_bounded() -> None:
    """Each call of `advance` updates at most `most` VMIs."""
    store = a_store(*(a_vmi(name=f"db{i}", uid=f"{i}", migration=a_state()) for i in range(5)))
    view = some_verdicts(store, POLICY)
    left = [is_behind(view, NOW) for _ in range(4)]
    assert left == [True, True, False, False]


def test_catching_up_ends_where_ends_lie_ahead() -> None:
    """Repeated calls of `advance` finish even if the ends of all VMIs lie ahead of the clock."""
    ahead = a_state(end=NOW + 60.0)
    store = a_store(*(a_vmi(name=f"db{i}", uid=f"{i}", migration=ahead) for i in range(5)))
    view = some_verdicts(store, POLICY)
    left = [is_behind(view, NOW + i) for i in range(3)]
    assert left == [True, True, False]
    assert summarized(view, NOW + 9) == decided(store, POLICY, NOW + 9)


def test_what_was_replaced_is_not_kept_for_ever() -> None:
    """A VMI that migrates many times needs only bounded memory."""
    store = a_store()
    view = some_verdicts(store, POLICY)
    for i in range(3 * SPARE):
        state = a_state(uid=f"m{i}", end=NOW - 600.0 + i / SPARE)
        store.put(a_vmi(node=f"node-{i}", migration=state))
        summarized(view)
    assert count_kept(view) <= SPARE + 6


@pytest.mark.parametrize("end", [NOW + 60.0, NOW - 60.0])
def test_of_a_vmi_that_is_gone_nothing_is_kept(end: Instant) -> None:
    """A deleted VMI leaves nothing in the view."""
    store = a_store(a_vmi(migration=a_state(end=end)))
    view = some_verdicts(store, POLICY)
    summarized(view)
    assert count_kept(view) > 0
    store.remove(Resource.VMIS, NAMESPACE, NAME, UID)
    assert list(view.list_blocked()) == []
    summarized(view, NOW + 90_000.0)
    assert count_kept(view) == 0


def test_a_change_for_all_vmis_counts_at_once() -> None:
    """After a change for all VMIs the view has the new verdicts, even before the next `advance`."""
    policy = Policy(guard_platform_update=True)
    store = a_store(a_vmi(), a_vmi(name="db2", uid="2"), KubeVirtSettings())
    view = some_verdicts(store, policy)
    assert summarized(view)[0] == {(ALLOWED, "n1"): 2}
    store.put(KubeVirtSettings(updating=True))
    assert len(list(view.list_blocked())) == 2
    store.put(KubeVirtSettings())
    assert view.summarize().verdicts == {(ALLOWED, "n1"): 2}


@pytest.mark.parametrize(
    "moved",
    [
        pytest.param(None, id="never"),
        pytest.param(a_state(start=NOW - 90_060, end=NOW - 90_000), id="long-ago"),
    ],
)
def test_a_vmi_that_stays_allowed_has_an_entry_only_if_somebody_asks(
    moved: MigrationState | None,
) -> None:
    """VMIs that did not migrate lately need no entry for a scrape."""
    store = a_store(a_vmi(migration=moved), a_vmi(name="db2", uid="2"))
    view = some_verdicts(store, POLICY)
    assert summarized(view)[0] == {(ALLOWED, "n1"): 2}
    assert count_kept(view) == 0
    entry = view.find(NAMESPACE, NAME)
    assert entry is not None
    assert entry is view.find(NAMESPACE, NAME)
    assert entry.verdict(None).allowed


def test_idle_vmis_are_blocked_by_their_entry_and_by_an_update() -> None:
    """An idle VMI is blocked by `block: true` and by an update of KubeVirt."""
    own = Override(name="db", policy=Policy(guard_platform_update=True, block=True))
    policy = Policy(guard_platform_update=True, overrides=(own,))
    store = a_store(a_vmi(override="db"), a_vmi(name="db2", uid="2"), KubeVirtSettings())
    view = some_verdicts(store, policy)
    assert summarized(view)[0] == {("policy", "n1"): 1, ("allowed", "n1"): 1}
    store.put(KubeVirtSettings(updating=True))
    assert summarized(view)[0] == {("platform_update", "n1"): 2}
    store.put(KubeVirtSettings())
    assert summarized(view)[0] == {("policy", "n1"): 1, ("allowed", "n1"): 1}


def test_an_entry_is_kept_while_it_is_valid() -> None:
    """An entry is reused until the clock or the store may change it."""
    store = a_store(a_vmi(migration=a_state()))
    view = some_verdicts(store, POLICY)
    view.advance(NOW, Trust())
    entry = view.find(NAMESPACE, NAME)
    view.advance(NOW + 299.0, Trust())
    assert view.find(NAMESPACE, NAME) is entry
    store.put(a_pod())
    assert view.find(NAMESPACE, NAME) is not entry
    assert view.find(NAMESPACE, "unknown") is None


@pytest.mark.parametrize(
    ("end", "others", "floor", "until"),
    [
        pytest.param(0.0, (), 900.0, 900.0, id="ends-now-and-cools-down"),
        pytest.param(0.0, (), 0.0, 86_400.0, id="ends-now-without-a-cooldown"),
        pytest.param(900.0, (), 900.0, 85_500.0, id="not-cooling-down"),
        pytest.param(3_000.0, (4_000.0,), 900.0, 82_400.0, id="older-ending"),
        pytest.param(86_400.0, (), 900.0, math.inf, id="just-left-the-window"),
        pytest.param(-1.0, (), 900.0, 1.0, id="a-little-ahead"),
        pytest.param(-CLOCK_SKEW, (), 900.0, CLOCK_SKEW, id="as-far-ahead-as-is-believed"),
        pytest.param(-CLOCK_SKEW - 9.0, (), 900.0, 9.0, id="far-ahead"),
    ],
)
def test_until_when_an_entry_is_valid(
    end: Seconds, others: tuple[Seconds, ...], floor: Seconds, until: Instant
) -> None:
    """An entry is valid until its cooldown ends, or until an ending starts to count or no longer
    counts.
    """
    state = a_state(uid="m0", start=None, end=NOW - end)
    older = [
        an_ended_vmim(name=f"m{i}", uid=f"m{i}", start=None, end=NOW - age, finished_at=NOW - age)
        for i, age in enumerate(others, 1)
    ]
    store = a_store(a_vmi(migration=state), *older)
    view = some_verdicts(store, a_policy(migration_cooldown=floor))
    view.advance(NOW, Trust())
    entry = view.find(NAMESPACE, NAME)
    assert entry is not None
    assert entry.until == NOW + until


def test_the_revision_grows_with_the_blocked_vmis_alone() -> None:
    """The revision grows only when a VMI is blocked, released or blocked for another reason."""
    store = a_store(a_vmi(migration=a_state(end=NOW + 60.0)), a_vmi(name="db2", uid="2"))
    view = some_verdicts(store, POLICY)

    def revision(now: Instant) -> int:
        summarized(view, now)
        return view.revision

    first = revision(NOW)
    assert revision(NOW + 10.0) == first
    store.put(a_pod())
    assert revision(NOW + 10.0) == first
    store.put(a_vmim())
    second = revision(NOW + 10.0)
    assert second > first
    assert revision(NOW + 90_000.0) > second


# --- any sequence of changes, pauses and updates


NAMES = ("db1", "db2", "db3")
OFFSETS = (-90_000.0, -5_000.0, -880.0, -600.0, -1.0, 0.0, 10.0, 250.0, 350.0, 2_000.0)
STEPS = (-50_000.0, -60.0, -1.0, 0.0, 1.0, 20.0, 60.0, 301.0, 900.0, 7_000.0, 86_400.0)


@dataclass(frozen=True)
class Pause:
    """Change the clock and what may be believed, and update `looks` VMIs."""

    seconds: float
    trust: Trust
    looks: int


Step: TypeAlias = Change | Pause

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
objects = st.one_of(
    st.tuples(st.just(Resource.VMIS), st.sampled_from(NAMES)),
    st.tuples(st.just(Resource.VMIMS), st.sampled_from(("mig-1", "mig-2", "mig-3"))),
    st.tuples(st.just(Resource.PODS), st.sampled_from(NAMES).map("pod-{}".format)),
)
deletions = objects.map(lambda key: Removed(key[0], NAMESPACE, key[1]))
refusals = objects.map(lambda key: Unreadable(key[0], NAMESPACE, key[1]))
dead_sets = st.frozensets(st.sampled_from(CLUSTER_RESOURCES))
unseen_sets = st.frozensets(st.sampled_from((Resource.VMIMS, Resource.PODS)))
places = st.builds(NamespaceTrust, unseen_sets, dead_sets)
trusts = st.just(Trust()) | st.builds(Trust, places, st.dictionaries(st.just(NAMESPACE), places))
pauses = st.builds(Pause, st.sampled_from(STEPS), trusts, st.integers(0, 2))
facts = (strategy.map(Observed) for strategy in (vmis, vmis, vmims, pods))
lives = st.lists(st.one_of(*facts, deletions, refusals, pauses, pauses), max_size=40)


@dataclass
class Play:
    """A store with its view, the clock, and what may be believed."""

    policy: Policy
    store: ClockedStore = field(default_factory=lambda: a_store(now=NOW))
    now: Instant = NOW
    view: Verdicts = field(init=False)

    def __post_init__(self) -> None:
        self.view = some_verdicts(self.store, self.policy)

    def step(self, step: Step) -> None:
        """Apply one step."""
        if isinstance(step, Pause):
            self.now += step.seconds
            self.store.trust = step.trust
            if step.looks:
                self.view.advance(self.now, step.trust, most=step.looks)
        else:
            self.store.apply(step, self.now)


def play(steps: Iterable[Step], policy: Policy, *, asking: bool) -> None:
    """Compare the view with newly computed verdicts after the steps; with `asking`, after each."""
    played = Play(policy)
    for step in steps:
        played.step(step)
        if asking:
            check(played)
    check(played)


def check(played: Play) -> None:
    """Compare the view, and all that is derived from it, with newly computed verdicts."""
    now, trust, view = played.now, played.store.trust, played.view
    assert summarized(view, now, trust) == decided(played.store, played.policy, now, trust)
    blocked, foreseen = [], set[BlockLabels]()
    for evidence in played.store.all_evidence():
        vmi = evidence.vmi
        entry = view.find(vmi.namespace, vmi.name)
        assert entry is not None
        reasons = set[Reason]()
        for at in (None, *Checkpoint):
            verdict = decide(evidence, played.policy, now, checkpoint=at)
            assert entry.verdict(at) == verdict
            reasons |= {verdict.reason} if verdict.reason else set()
        foreseen |= foresee_blocks(evidence, reasons)
        assert entry.cooldown == measure_cooldown(evidence, played.policy, now)
        blocked += [] if entry.verdict(None).allowed else [vmi.name]
    assert [entry.evidence.vmi.name for entry in view.list_blocked()] == sorted(blocked)
    assert sorted(view.summarize().foreseen) == sorted(foreseen)
    unsettled = [evidence for evidence in played.store.all_evidence() if evidence.unsettled]
    assert by_name(view.list_unsettled()) == by_name(unsettled)
    check_unchanged(played, math.nextafter(min(view.changes_at(), now + 1e6), now))


def by_name(every: Iterable[Evidence]) -> dict[str, Evidence]:
    """The evidence by the VMI's name, without the trust: contacts are news, but no change."""
    return {e.vmi.name: replace(e.snapshot(), trust=NamespaceTrust()) for e in every}


def check_unchanged(played: Play, later: Instant) -> None:
    """Check that the verdicts at `later` are the same as now."""
    for evidence in played.store.all_evidence():
        if played.store.is_idle((evidence.vmi.namespace, evidence.vmi.name)):
            continue
        for at in Checkpoint:
            first, last = (
                decide(evidence, played.policy, now, checkpoint=at) for now in (played.now, later)
            )
            assert (first.reason, first.released_at) == (last.reason, last.released_at)


policies = st.builds(
    a_policy,
    migration_history_window=st.sampled_from((0.0, 120.0, 86_400.0)),
    count_failed_migrations=st.booleans(),
    guard_pending_migrations=st.booleans(),
    guard_evacuations=st.booleans(),
)


@soaked(50_000)
@given(steps=lives, policy=policies, asking=st.booleans())
def test_the_view_has_what_deciding_anew_gives(
    steps: list[Step], policy: Policy, *, asking: bool
) -> None:
    """After any events and clock changes the view equals newly computed verdicts."""
    play(steps, policy, asking=asking)
