"""The rules and the arithmetic of the cooldown."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import History, Migration
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    CLUSTER_RESOURCES,
    Checkpoint,
    Instant,
    MigrationState,
    Mismatch,
    Outcome,
    Resource,
    Seconds,
)
from exporter.engine.facts.policy import COOLDOWN_VALUES, Override, Policy, Reason, Verdict
from exporter.engine.facts.trust import DEAD_AFTER, NamespaceTrust
from exporter.engine.verdicts.cooldown import (
    LONGEST_COOLDOWN,
    Cooldown,
    CooldownMark,
    back_off,
    known_ends,
    mark_cooldown,
    measure_cooldown,
)
from exporter.engine.verdicts.rules import RULES, evaluate_rules, list_reasons, not_ours
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
    some_evidence,
)
from tests.support.sizes import soaked
from tests.support.verdicts import decide


EMPTIED = MigrationState(uid="m1")
FAILURE = a_state(end=NOW - 100.0, outcome=Outcome.FAILED)
EVACUATING = a_vmi(evacuation_node="n1")
RUNNING = some_evidence(vmi=a_vmi(migration=a_running_state()))
PENDING = some_evidence(vmims=(a_vmim(),))
REQUESTED = some_evidence(vmi=EVACUATING)
EVERYTHING = some_evidence(
    vmi=a_vmi(migration=a_state(), evacuation_node="n1"),
    history=a_history(m1=a_migration()),
    vmims=(a_vmim(uid="m2"),),
)


def ended(
    ago: Seconds, *, took: Seconds = 60.0, others: tuple[Seconds, ...] = (), **state: Any
) -> Evidence:
    """Evidence of a migration that ended `ago` seconds ago, and of others that ended earlier."""
    latest = a_state(uid="m0", start=NOW - ago - took, end=NOW - ago, **state)
    history = History()
    history.put("m0", record_of(latest), keep=64)
    for number, other in enumerate(others, start=1):
        history.put(f"m{number}", a_migration(start=None, end=NOW - other), keep=64)
    return some_evidence(vmi=a_vmi(migration=latest), history=history)


def record_of(state: MigrationState) -> Migration:
    """The record that the store makes from a VMI's own state."""
    return Migration(start=state.start, end=state.end, outcome=state.outcome, handed_off=True)


def measured(evidence: Evidence, policy: Policy, now: Instant = NOW) -> Cooldown:
    """The cooldown, which must exist."""
    cooldown = measure_cooldown(evidence, policy, now)
    assert cooldown is not None
    return cooldown


def verdicts(evidence: Evidence, policy: Policy, now: Instant = NOW) -> tuple[str, str]:
    """The reasons at filter and at preEviction; "" means that the eviction is allowed."""
    filtered, evicted = (
        decide(evidence, policy, now, checkpoint=checkpoint) for checkpoint in Checkpoint
    )
    return filtered.reason or "", evicted.reason or ""


# --- the rules


@pytest.mark.parametrize(
    ("evidence", "blocked"),
    [
        pytest.param(some_evidence(), ("", ""), id="never-migrated"),
        pytest.param(RUNNING, ("migration_in_progress", ""), id="running"),
        pytest.param(
            some_evidence(vmi=a_vmi(migration=a_state(end=None, ended=True))),
            ("", ""),
            id="started-and-ended-at-an-unreadable-instant",
        ),
        pytest.param(ended(60.0), ("", "cooldown"), id="just-ended"),
        pytest.param(ended(900.0), ("", ""), id="ended-a-cooldown-ago"),
        pytest.param(ended(-CLOCK_SKEW), ("", "cooldown"), id="ends-a-little-ahead"),
        pytest.param(ended(-CLOCK_SKEW - 1), ("", ""), id="ends-far-ahead"),
        pytest.param(PENDING, ("migration_in_progress", ""), id="vmim-waits"),
        pytest.param(some_evidence(vmims=(an_ended_vmim(),)), ("", ""), id="vmim-ended"),
        pytest.param(
            some_evidence(
                vmi=a_vmi(migration=EMPTIED),
                vmims=(an_ended_vmim(uid="m0", name="mig-0"), a_vmim(phase="Scheduled")),
            ),
            ("migration_in_progress", ""),
            id="handed-off-not-started",
        ),
        pytest.param(REQUESTED, ("evacuation_in_progress", ""), id="evacuation-requested"),
        pytest.param(
            replace(REQUESTED, launcher=a_pod(eviction_in_progress=True)),
            ("", ""),
            id="evacuation-known-to-the-descheduler",
        ),
        pytest.param(replace(REQUESTED, launcher=None), ("", ""), id="evacuation-pod-not-seen"),
        pytest.param(
            some_evidence(vmi=a_vmi(evacuation_node="n1", node="n2")),
            ("", ""),
            id="evacuation-has-left-the-node",
        ),
        pytest.param(
            some_evidence(vmi=a_vmi(evacuation_node="", node="")), ("", ""), id="no-node-at-all"
        ),
    ],
)
def test_rules(evidence: Evidence, blocked: tuple[str, str]) -> None:
    """Each rule blocks only on its own evidence, and only at its own checkpoint."""
    assert verdicts(evidence, a_policy()) == blocked


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param(RUNNING, id="running"),
        pytest.param(PENDING, id="vmim-waits"),
        pytest.param(REQUESTED, id="evacuation-requested"),
        pytest.param(ended(60.0), id="just-ended"),
        pytest.param(
            some_evidence(vmi=a_vmi(migration=EMPTIED), history=a_history(m0=a_migration())),
            id="emptied",
        ),
    ],
)
def test_a_vmi_that_has_ended(evidence: Evidence, phase: str) -> None:
    """No rule blocks a VMI that has ended."""
    over = replace(evidence, vmi=replace(evidence.vmi, phase=phase))
    assert verdicts(evidence, a_policy()) != ("", "")
    assert verdicts(over, a_policy()) == ("", "")
    assert measure_cooldown(over, a_policy(), NOW) is None
    assert not any(finding.blocks for finding in evaluate_rules(over, a_policy(), NOW))


def test_rules_speak_in_order() -> None:
    """Without a checkpoint the reason comes from the first rule in `RULES` that blocks."""
    without_pending = a_policy(guard_pending_migrations=False)
    without_guards = a_policy(guard_pending_migrations=False, guard_evacuations=False)
    assert [
        decide(EVERYTHING, policy, NOW).reason
        for policy in (a_policy(), without_pending, without_guards)
    ] == [Reason.MIGRATION_IN_PROGRESS, Reason.EVACUATION_IN_PROGRESS, Reason.COOLDOWN]
    assert [rule.name for rule in RULES] == [
        "running_migration",
        "pending_migration",
        "requested_evacuation",
        "platform_update",
        "policy",
        "cooldown",
    ]


RESTS_ON = {
    "running_migration": {Resource.VMIS},
    "pending_migration": {Resource.VMIS, Resource.VMIMS},
    "requested_evacuation": {Resource.VMIS, Resource.PODS},
    "platform_update": {Resource.VMIS, Resource.KUBEVIRTS},
    "policy": {Resource.VMIS},
    "cooldown": set(),
}
BLOCKING = a_policy(
    guard_platform_update=True, overrides=(Override(name="db", policy=a_policy(block=True)),)
)
"""A policy with both optional rules: `guard_platform_update` for all VMIs, and `block` for those
with the override `db`.
"""


@pytest.mark.parametrize("dead", CLUSTER_RESOURCES)
@pytest.mark.parametrize(
    ("evidence", "rule"),
    [
        pytest.param(RUNNING, "running_migration", id="running"),
        pytest.param(PENDING, "pending_migration", id="pending"),
        pytest.param(REQUESTED, "requested_evacuation", id="evacuation"),
        pytest.param(some_evidence(platform_updating=True), "platform_update", id="update"),
        pytest.param(some_evidence(vmi=a_vmi(override="db")), "policy", id="policy"),
        pytest.param(ended(60.0), "cooldown", id="cooldown"),
    ],
)
def test_a_rule_is_silent_while_what_it_rests_on_is_dead(
    evidence: Evidence, rule: str, dead: Resource
) -> None:
    """A rule does not block while the watch of a resource that it reads is dead."""
    silent = dead in RESTS_ON[rule]
    assert not decide(evidence, BLOCKING, NOW).allowed
    evidence = replace(evidence, trust=NamespaceTrust(dead=frozenset({dead})))
    assert decide(evidence, BLOCKING, NOW).allowed is silent
    findings = evaluate_rules(evidence, BLOCKING.of(evidence.vmi), NOW)
    for finding in findings:
        assert finding.silenced == (dead in RESTS_ON[finding.rule])
    assert [finding.rule for finding in findings if finding.blocks] == ([] if silent else [rule])


@pytest.mark.parametrize(
    ("state", "vmims", "seen", "blocked"),
    [
        pytest.param(EMPTIED, (), True, True, id="vmim-deleted"),
        pytest.param(EMPTIED, (an_ended_vmim(),), True, True, id="vmim-finished"),
        pytest.param(EMPTIED, (a_vmim(phase="Scheduled"),), True, False, id="vmim-unfinished"),
        pytest.param(EMPTIED, (a_vmim(uid="m2"),), True, True, id="another-vmim-waits"),
        pytest.param(EMPTIED, (), False, False, id="vmims-not-seen"),
        pytest.param(MigrationState(), (a_vmim(uid="m2"),), True, False, id="no-uid-and-one-waits"),
        pytest.param(MigrationState(), (), True, True, id="no-uid-and-none-waits"),
        pytest.param(a_running_state(), (), True, False, id="running"),
        pytest.param(None, (), True, False, id="no-state-at-all"),
    ],
)
def test_emptied_state(
    state: MigrationState | None, vmims: tuple[Any, ...], *, seen: bool, blocked: bool
) -> None:
    """If `migrationState` is empty, the newest ending in the history counts.

    There is no cooldown while the VMIM of the last hand-off may be unfinished.
    """
    evidence = some_evidence(
        vmi=a_vmi(migration=state),
        history=a_history(m0=a_migration(start=None, end=NOW - 300.0)),
        vmims=vmims,
        trust=NamespaceTrust(frozenset(() if seen else (Resource.VMIMS,))),
    )
    verdict = decide(evidence, a_policy(), NOW, checkpoint=Checkpoint.PRE_EVICTION)
    assert verdict.not_before == (NOW + 600.0 if blocked else None)
    assert verdict.effective_cooldown == (900.0 if blocked else None)
    assert verdict.migrations_in_window == 1


def test_emptied_state_of_a_vmi_without_history() -> None:
    """With an empty `migrationState` and no history, no rule blocks."""
    evidence = some_evidence(vmi=a_vmi(migration=EMPTIED))
    assert decide(evidence, a_policy(), NOW) == Verdict(known=True)


# --- failures


def test_failures_count_unless_left_out() -> None:
    """Failures count for the cooldown, except with `countFailedMigrations: false`."""
    failed = ended(60.0, others=(1_000.0,), outcome=Outcome.FAILED)
    counting, leaving_out = a_policy(), a_policy(count_failed_migrations=False)
    verdict = decide(failed, counting, NOW)
    assert (verdict.migrations_in_window, verdict.effective_cooldown) == (2, 1_800.0)
    verdict = decide(failed, leaving_out, NOW)
    assert (verdict.migrations_in_window, verdict.effective_cooldown) == (1, 900.0)
    assert (verdict.allowed, verdict.not_before) == (True, None)


@pytest.mark.parametrize(
    ("before", "not_before"),
    [
        pytest.param({"m0": a_migration(end=NOW - 300.0)}, NOW + 600.0, id="a-success-before"),
        pytest.param({}, None, id="nothing-before"),
    ],
)
@pytest.mark.parametrize("end", [NOW - 10.0, None], ids=["end-known", "end-unreadable"])
def test_a_failure_left_out_wipes_out_no_success(
    before: dict[str, Migration], not_before: float | None, end: float | None
) -> None:
    """A failure that is left out does not end the cooldown of the success before it."""
    state = a_state(uid="m9", end=end, ended=True, outcome=Outcome.FAILED)
    history = a_history(m9=record_of(state), **before)
    evidence = some_evidence(vmi=a_vmi(migration=state), history=history)
    verdict = decide(evidence, a_policy(count_failed_migrations=False), NOW)
    assert verdict.not_before == not_before


@pytest.mark.parametrize(
    ("state", "counted", "end"),
    [
        pytest.param(a_state(end=NOW - 100.0), True, NOW - 100.0, id="success"),
        pytest.param(a_state(end=NOW - 100.0), False, NOW - 100.0, id="success-alone-counted"),
        pytest.param(FAILURE, True, NOW - 100.0, id="failure"),
        pytest.param(FAILURE, False, NOW - 50.0, id="left-out"),
        pytest.param(EMPTIED, True, NOW - 50.0, id="emptied"),
    ],
)
def test_which_migration_ended_last(state: MigrationState, end: Instant, *, counted: bool) -> None:
    """The last migration is the one in the VMI's state, else the newest ending in the history."""
    history = a_history(
        m0=a_migration(start=None, end=NOW - 80.0), m2=a_migration(start=None, end=NOW - 50.0)
    )
    evidence = some_evidence(vmi=a_vmi(migration=state), history=history)
    assert measured(evidence, a_policy(count_failed_migrations=counted)).end == end


def test_a_failure_told_by_the_vmim_alone_is_left_out() -> None:
    """With `countFailedMigrations: false` a failure that only the VMIM shows is left out too."""
    state = a_state(outcome=Outcome.UNKNOWN, end=NOW - 60.0)
    history = a_history(m1=record_of(state))
    evidence = some_evidence(vmi=a_vmi(migration=state), history=history)
    policy = a_policy(count_failed_migrations=False)
    assert decide(evidence, policy, NOW).reason is Reason.COOLDOWN
    history.put("m1", Migration(outcome=Outcome.FAILED), keep=64)
    assert decide(evidence, policy, NOW).allowed


@pytest.mark.parametrize(
    ("state", "migration"),
    [
        pytest.param(a_state(uid="m9", end=NOW - 80.0), "m9", id="its-own"),
        pytest.param(a_state(uid="", end=NOW - 80.0), f"@{NOW - 80.0}", id="without-a-uid"),
        pytest.param(EMPTIED, "new", id="emptied"),
    ],
)
def test_what_tells_cooldowns_apart(state: MigrationState, migration: str) -> None:
    """A cooldown is known by the VMI's last migration, or else by the newest in the history."""
    old, new, running = (a_migration(end=end) for end in (NOW - 90.0, NOW - 50.0, None))
    history = a_history(old=old, new=new, running=running)
    evidence = some_evidence(vmi=a_vmi(migration=state), history=history)
    cooldown = measured(evidence, a_policy())
    assert mark_cooldown(evidence, cooldown) == CooldownMark(migration, cooldown.end)
    assert {*known_ends(evidence)} == {NOW - 90.0, NOW - 50.0, state.end or NOW - 50.0}


# --- the arithmetic


@pytest.mark.parametrize(
    ("policy", "took", "count", "effective"),
    [
        pytest.param({}, 60.0, 1, 900.0, id="floor"),
        pytest.param({}, 1_500.0, 1, 1_500.0, id="duration-over-floor"),
        pytest.param({}, 60.0, 2, 1_800.0, id="doubled"),
        pytest.param({}, 60.0, 5, 14_400.0, id="four-times-doubled"),
        pytest.param({}, 60.0, 6, 21_600.0, id="capped"),
        pytest.param({}, 30_000.0, 1, 21_600.0, id="duration-over-cap"),
        pytest.param({"max_migration_cooldown": 0.0}, 60.0, 8, 115_200.0, id="no-cap"),
        pytest.param({"migration_cooldown": 0.0}, 60.0, 1, 60.0, id="no-floor"),
        pytest.param({"migration_cooldown": 0.0}, 60.0, 3, 240.0, id="no-floor-doubled"),
        pytest.param({"migration_cooldown": 0.0}, 0.0, 9, 0.0, id="no-floor-no-duration"),
        pytest.param({"migration_history_window": 0.0}, 60.0, 9, 900.0, id="no-window"),
        pytest.param({"migration_history_window": 30.0}, 60.0, 9, 900.0, id="all-left-the-window"),
    ],
)
def test_effective_cooldown(
    policy: dict[str, float], took: float, count: int, effective: float
) -> None:
    """The cooldown is min(cap, max(floor, duration) * 2^(n-1)), where 0 turns a term off."""
    evidence = ended(60.0, took=took, others=tuple(60.0 + i for i in range(1, count)))
    assert measured(evidence, a_policy(**policy)).effective == effective


@pytest.mark.parametrize("field", COOLDOWN_VALUES)
def test_each_value_of_the_policy_counts(field: str) -> None:
    """Another value gives the same VM another cooldown: a success after four failures."""
    failed = {
        f"failed-{i}": a_migration(end=NOW - 600.0 * i, outcome=Outcome.FAILED) for i in range(1, 5)
    }
    evidence = ended(60.0, took=60.0)
    history = a_history(**failed, **evidence.history.records())
    policy = a_policy(max_migration_cooldown=12_000.0)
    value = getattr(policy, field)
    changed = replace(policy, **{field: not value if value is True else value / 1_000})

    assert measured(replace(evidence, history=history), policy).effective == 12_000.0
    assert measured(replace(evidence, history=history), changed).effective != 12_000.0


def test_arithmetic_is_told() -> None:
    """A `Cooldown` has the result of each step of the arithmetic."""
    evidence = ended(100.0, took=1_000.0, others=(500.0, 90_000.0))
    assert measured(evidence, a_policy(max_migration_cooldown=1_500.0)) == Cooldown(
        end=NOW - 100.0,
        duration=1_000.0,
        migrations_in_window=2,
        base=1_000.0,
        backed=2_000.0,
        effective=1_500.0,
        not_before=NOW + 1_400.0,
        released_at=NOW + 1_400.0,
        blocks=True,
        moves=False,
    )


@pytest.mark.parametrize(
    ("ago", "inside"),
    [
        pytest.param(0.0, True, id="ends-now"),
        pytest.param(99.0, True, id="inside"),
        pytest.param(100.0, False, id="at-the-edge"),
        pytest.param(-CLOCK_SKEW, True, id="a-little-ahead"),
        pytest.param(-CLOCK_SKEW - 1.0, False, id="far-ahead"),
    ],
)
def test_window(ago: float, *, inside: bool) -> None:
    """An ending counts if now - window < end <= now; an end a little ahead of the clock counts as
    now.
    """
    history = a_history(m0=a_migration(end=NOW - ago))
    verdict = decide(some_evidence(history=history), a_policy(migration_history_window=100.0), NOW)
    assert verdict.migrations_in_window == int(inside)


@pytest.mark.parametrize(("window", "settled"), [(86_400.0, 14_400.0), (172_800.0, 21_600.0)])
def test_a_cooldown_stays_at_its_maximum_only_with_a_long_window(
    window: float, settled: float
) -> None:
    """docs/reference.md says where the cooldown of a VM ends up that moves whenever it may."""
    policy = a_policy(migration_history_window=window)
    history, now = History(), NOW
    cooldowns = []
    for number in range(40):
        state = a_state(uid=f"m{number}", start=now, end=now)
        history.put(state.uid, record_of(state), keep=64)
        evidence = some_evidence(vmi=a_vmi(migration=state), history=history)
        cooldown = measure_cooldown(evidence, policy, now)
        assert cooldown is not None
        cooldowns.append(cooldown.not_before - now)
        now = cooldown.not_before

    assert cooldowns[:6] == [900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0]
    assert set(cooldowns[20:]) == {settled}


def test_verdict_of_a_cooldown() -> None:
    """If a cooldown blocks, the verdict has its length, its end and the number of migrations."""
    assert decide(ended(100.0, others=(200.0,)), a_policy(), NOW) == Verdict(
        known=True,
        checkpoint=Checkpoint.PRE_EVICTION,
        reason=Reason.COOLDOWN,
        not_before=NOW + 1_700.0,
        released_at=NOW + 1_700.0,
        effective_cooldown=1_800.0,
        migrations_in_window=2,
    )


def test_verdict_of_another_rule() -> None:
    """If another rule blocks, the verdict has the length of the cooldown, but not its end."""
    evidence = replace(ended(100.0), vmims=(a_vmim(uid="m2"),))
    assert decide(evidence, a_policy(), NOW) == Verdict(
        known=True,
        checkpoint=Checkpoint.FILTER,
        reason=Reason.MIGRATION_IN_PROGRESS,
        effective_cooldown=900.0,
        migrations_in_window=1,
    )


def test_not_ours() -> None:
    """A candidate that is not a VMI of this cluster is allowed, and the verdict says why."""
    verdict = not_ours(Mismatch.UID)
    assert (verdict.known, verdict.mismatch, verdict.allowed) == (False, Mismatch.UID, True)


def test_explain() -> None:
    """The explanation has the result of each rule of the policy, not only of the first to block."""
    findings = evaluate_rules(EVERYTHING, a_policy(guard_evacuations=False), NOW)
    assert [(f.rule, f.enabled, f.silenced, f.blocks) for f in findings] == [
        ("running_migration", True, False, False),
        ("pending_migration", True, False, True),
        ("requested_evacuation", False, False, False),
        ("cooldown", True, False, True),
    ]


UPDATING = some_evidence(platform_updating=True)
ABANDONED = some_evidence(
    vmi=a_vmi(migration=EMPTIED), history=a_history(m1=a_migration(end=NOW - 60.0))
)
NO_PENDING: dict[str, Any] = {"guard_pending_migrations": False}
UPDATES: dict[str, Any] = {"guard_platform_update": True}
DB = {"overrides": (Override(name="db", policy=a_policy(block=True)),)}
FIXED = a_vmi(override="db")


@pytest.mark.parametrize(
    ("policy", "evidence", "reasons"),
    [
        ({}, ABANDONED, ("", "cooldown")),
        (NO_PENDING, ABANDONED, ("", "")),
        (NO_PENDING, PENDING, ("", "")),
        ({"guard_evacuations": False}, REQUESTED, ("", "")),
        (UPDATES, UPDATING, ("platform_update", "")),
        (UPDATES, some_evidence(), ("", "")),
        ({}, UPDATING, ("", "")),
        (DB, some_evidence(vmi=FIXED), ("", "policy")),
        (DB, some_evidence(), ("", "")),
        (DB, some_evidence(vmi=replace(FIXED, phase="Failed")), ("", "")),
        (DB | UPDATES, replace(UPDATING, vmi=replace(FIXED, migration=a_state())), ("", "policy")),
    ],
)
def test_what_the_policy_sets(
    policy: dict[str, Any], evidence: Evidence, reasons: tuple[str, str]
) -> None:
    """A guard that is off does not block.

    An update of KubeVirt blocks at filter, and an override with `block: true` at preEviction.
    """
    assert verdicts(evidence, a_policy(**policy)) == reasons


def test_the_cooldown_is_that_of_the_vm_s_own_entry() -> None:
    """The cooldown of a VM with an override has the floor of that override."""
    own = Override(name="db", policy=a_policy(migration_cooldown=7200.0))
    policy = a_policy(overrides=(own,))
    moved = {"migration": a_state(), "override": "db"}
    assert decide(some_evidence(vmi=a_vmi(**moved)), policy, NOW).effective_cooldown == 7200.0


@pytest.mark.parametrize(
    ("floor", "ceiling", "kept"),
    [
        pytest.param(900.0, 21_600.0, 16, id="at-least-16"),
        pytest.param(1.0, 2.0**20, 21, id="log2-of-cap-over-floor"),
        pytest.param(1.0, 2.0**20 + 1, 22, id="rounded-up"),
        pytest.param(0.0, 21_600.0, 64, id="no-floor"),
        pytest.param(900.0, 0.0, 64, id="no-cap"),
    ],
)
def test_endings_kept(floor: float, ceiling: float, kept: int) -> None:
    """`endings_kept` is the largest number of endings that the policy can need."""
    policy = a_policy(migration_cooldown=floor, max_migration_cooldown=ceiling)
    assert policy.endings_kept == kept


def test_the_policy_of_an_override_counts_for_what_is_stored() -> None:
    """The history file is long enough for the default policy and for every override."""
    small, large = a_policy(), a_policy(migration_cooldown=0.0, migration_history_window=1e6)
    for default, other in ((small, large), (large, small)):
        policy = replace(default, overrides=(Override(name="other", policy=other),))
        assert (policy.longest_window, policy.endings_kept) == (1e6, 64)


def test_the_log_names_a_policy_by_its_fields() -> None:
    """The log has the names of the fields, of an override too, and not those of the API."""
    policy = a_policy(overrides=(Override(name="other", policy=a_policy(block=True)),))
    (override,) = policy.by_field["overrides"]

    assert list(policy.by_field) == list(Policy.__struct_fields__)
    assert override["policy"] == a_policy(block=True).by_field


def test_reasons_of_a_policy() -> None:
    """The reasons `platform_update` and `policy` apply only if the policy sets them; the others
    always apply.
    """
    optional = {Reason.PLATFORM_UPDATE, Reason.POLICY}
    assert set(Reason) - set(list_reasons(a_policy())) == optional
    assert set(list_reasons(a_policy(guard_platform_update=True, block=True))) == set(Reason)


def test_what_cannot_be_read_any_more_blocks_for_a_while() -> None:
    """After a VMI became invalid, its running migration blocks until `dead_after` has passed."""
    unreadable = ((Resource.VMIS, NOW - DEAD_AFTER),)
    evidence = replace(RUNNING, unreadable=unreadable)
    for now, is_dead in ((NOW - 1, False), (NOW, True)):
        assert decide(evidence, a_policy(), now).allowed == is_dead
        running, *_ = evaluate_rules(evidence, a_policy(), now)
        assert (running.silenced, running.blocks) == (is_dead, not is_dead)


# --- the release


def test_release_looks_ahead() -> None:
    """`not_before` takes into account that the cooldown shrinks when endings leave the window.

    Two endings 50 s and 3000 s ago give a cooldown of 1800 s, which would last for 1750 s more. In
    300 s the older ending leaves the window of 3300 s, and the cooldown becomes 900 s.
    """
    cooldown = measured(ended(50.0, others=(3_000.0,)), a_policy(migration_history_window=3_300.0))
    assert cooldown.effective == 1_800.0
    assert cooldown.not_before == NOW + 850.0


def test_release_of_an_end_ahead_of_the_clock() -> None:
    """While the last end is ahead of the clock, the wait is the whole cooldown."""
    evidence = ended(-200.0)
    for later in (0.0, 50.0, 199.0):
        cooldown = measured(evidence, a_policy(), NOW + later)
        assert cooldown.not_before == NOW + later + cooldown.effective
        assert cooldown.released_at == NOW + 200.0 + cooldown.effective
        assert (cooldown.end, cooldown.migrations_in_window) == (NOW + later, 1)
        assert cooldown.moves
    assert not measured(evidence, a_policy(), NOW + 200.0).moves
    assert measured(evidence, a_policy(migration_history_window=0.0)).migrations_in_window == 0


POLICIES = st.builds(
    Policy,
    migration_cooldown=st.sampled_from([0.0, 60.0, 900.0]),
    max_migration_cooldown=st.sampled_from([0.0, 900.0, 1_200.0, 21_600.0]),
    migration_history_window=st.sampled_from([0.0, 600.0, 3_600.0, 86_400.0]),
    count_failed_migrations=st.booleans(),
)


@st.composite
def histories(draw: st.DrawFn, *, ahead: int = 0) -> Evidence:
    """A VMI with up to nine migrations of the last day; its `migrationState` is the last one.

    An end may lie up to `ahead` seconds ahead of the clock. Some ends are wrong by hours, as if the
    clock of a node was wrong. The VMI may show a running migration although its VMIM has ended.
    Some objects have become invalid.
    """
    endings = draw(
        st.lists(
            st.tuples(
                st.integers(-86_400, ahead),
                st.integers(-60, 7_200),
                st.sampled_from([Outcome.SUCCEEDED, Outcome.FAILED]),
                st.sampled_from([None, None, 0, -1, -7_200, 7_200]),
            ),
            min_size=1,
            max_size=9,
        )
    )
    endings.sort(key=lambda ending: ending[0])
    history, state = History(), EMPTIED
    for number, (end, took, outcome, off) in enumerate(endings):
        state = MigrationState(
            uid=f"m{number}",
            start=NOW + end - took,
            ended=True,
            end=NOW + end + (off or 0),
            outcome=outcome,
        )
        record = record_of(state)
        if off is not None:
            record = replace(record, finished_at=NOW + end)
        history.put(state.uid, record, keep=64)
    own = state
    match draw(st.integers(0, 5)):
        case 0:
            own = EMPTIED
        case 1:
            own = replace(state, ended=False, end=None)
        case _:
            pass
    pair = st.tuples(st.sampled_from(CLUSTER_RESOURCES), st.integers(-900, 0))
    unreadable = draw(st.lists(pair, max_size=1))
    return some_evidence(
        vmi=a_vmi(migration=own),
        history=history,
        unreadable=tuple((resource, NOW + since) for resource, since in unreadable),
    )


@soaked(20_000)
@given(evidence=histories(ahead=300), policy=POLICIES)
def test_release_is_exact(evidence: Evidence, policy: Policy) -> None:
    """A cooldown ends exactly at `released_at`, also with ends ahead of the clock.

    Without such ends, a cooling VM is blocked until `not_before`, which is the same instant.
    """
    verdict = decide(evidence, policy, NOW)
    assume(verdict.reason is Reason.COOLDOWN)
    assert verdict.not_before is not None
    assert verdict.released_at is not None
    assert verdict.released_at >= verdict.not_before
    just_before = decide(evidence, policy, verdict.released_at - 0.001)
    assert just_before.reason is Reason.COOLDOWN
    assert just_before.released_at == verdict.released_at
    assert decide(evidence, policy, verdict.released_at).allowed
    if all(end <= NOW for end in known_ends(evidence)):
        for part in (0.0, 0.25, 0.5, 0.9):
            during = decide(evidence, policy, NOW + part * (verdict.not_before - NOW))
            assert during.reason is Reason.COOLDOWN
            assert during.not_before == verdict.not_before == verdict.released_at


@given(evidence=histories(ahead=1_000), policy=POLICIES, later=st.integers(0, 100_000))
def test_no_wait_is_longer_than_the_cooldown(
    evidence: Evidence, policy: Policy, later: int
) -> None:
    """The wait is never longer than the effective cooldown, even if a migration ends in future."""
    now = NOW + later
    verdict = decide(evidence, policy, now)
    if verdict.not_before is not None:
        assert verdict.effective_cooldown is not None
        assert 0.0 < verdict.not_before - now <= verdict.effective_cooldown


# --- bounds


@given(
    base=st.floats(0.0, LONGEST_COOLDOWN * 10),
    fewer=st.integers(0, 10_000),
    more=st.integers(0, 10_000),
)
def test_back_off_grows_with_the_count(base: float, fewer: int, more: int) -> None:
    """More migrations never give a shorter cooldown, and Go's longest duration is the maximum."""
    fewer, more = sorted((fewer, more))
    assert 0.0 <= back_off(base, fewer) <= back_off(base, more) <= LONGEST_COOLDOWN


def test_nothing_overflows() -> None:
    """With no cap, 64 endings and a migration of 2000 years give Go's longest duration."""
    longest = 2_000 * 365 * 86_400.0
    evidence = ended(0.0, took=longest, others=tuple(float(i) for i in range(1, 64)))
    cooldown = measured(evidence, a_policy(max_migration_cooldown=0.0))
    assert cooldown.migrations_in_window == 64
    assert cooldown.backed == cooldown.effective == LONGEST_COOLDOWN == 9_223_372_036.0
    assert cooldown.blocks
