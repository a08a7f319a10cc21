"""The output of `explain`."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.cli.explain import count_migrations, show_vmi, write_arithmetic
from exporter.counters import BlockedEviction
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import EndReason, Outcome, Requester, Trigger, Why, WhySource
from exporter.engine.facts.policy import Override, Reason
from exporter.server.api.schemas import EvictionRequestAnswer, MigrationAnswer
from exporter.text import to_datetime
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    some_evidence,
)
from tests.unit.cli.answers import (
    PIPED,
    cooling,
    stuck,
)
from tests.unit.engine.evacuations.test_diagnosis import a_failed_attempt, an_attempt, an_evacuation
from tests.unit.server.api.test_answers import explained, moved, some_health


MIGRATABLE = {"eviction_strategy": "LiveMigrate", "migratable": True}


def test_a_vm_that_cools_down_is_explained() -> None:
    """The output has one sentence, the rules, the arithmetic, the migrations and the evidence."""
    assert show_vmi(explained(cooling()), PIPED) == (
        """\
shop/db1 may not be moved now: it is cooling down after its last migration, until \
2027-01-15T08:20:00Z (in 20m).
  in a drain  it goes down: its strategy is None

Rules, in the order in which they are checked
  running_migration     allows it  the last migration has ended: endTimestamp is \
2027-01-15T07:50:00Z (filter)
  pending_migration     allows it  no unfinished VMIM belongs to this VMI (filter)
  requested_evacuation  allows it  evacuationNodeName is not set (filter)
  cooldown              blocks it  migrations in the window: 2; base 15m, backed off to 30m, from \
2027-01-15T07:50:00Z on (preEviction)

Cooldown
  arithmetic      max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h
  counted         2 migrations
  last migration  ended 2027-01-15T07:50:00Z (10m ago), took 3m12s
  until           2027-01-15T08:20:00Z (in 20m)

Known migrations: 2, 2 of them counted
  ENDED                            FROM  TO  TOOK   WHY         BY     OUTCOME    COUNTED
  2027-01-15T06:55:00Z (1h5m ago)  ?     ?   1m40s  ?           ?      succeeded  yes
  2027-01-15T07:50:00Z (10m ago)   n2    n1  3m12s  evacuation  alice  succeeded  yes

Based on
  runs on       n1
  launcher pod  virt-launcher-db1-x: Running, ready
  last contact  2027-01-15T07:59:58Z (2s ago)
  not watched   nothing
  policy        default: minimum 15m, maximum 6h, window 1d
"""
    )


def a_move(
    outcome: str, trigger: Trigger = Trigger.EVACUATION, node: str = "n1"
) -> MigrationAnswer:
    """A migration from a node that counts."""
    return MigrationAnswer(
        uid=None, start=None, end=None, outcome=outcome, handed_off=True, in_window=True,
        source_node=node, target_node=None, trigger=trigger, reason=None, requested_by=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counted", "text"),
    [
        ([], "0 migrations"),
        ([a_move("succeeded")], "1 migration"),
        (
            [*[a_move("failed")] * 5, a_move("succeeded")],
            "6 migrations, 5 of them failed attempts of one evacuation",
        ),
        (
            [a_move("failed"), a_move("succeeded"), a_move("failed", node="n2")],
            "3 migrations, 2 of them failed attempts of 2 evacuations",
        ),
        (
            [a_move("failed"), a_move("failed", Trigger.MANUAL), a_move("succeeded")],
            (
                "3 migrations, 1 of them a failed attempt of one evacuation, "
                "1 of them failed otherwise"
            ),
        ),
    ],
)
def test_failures_that_count_are_named(counted: list[MigrationAnswer], text: str) -> None:
    """What counts says how many attempts of how many evacuations have failed."""
    assert count_migrations(counted) == text


def test_the_policy_of_a_vm_is_named() -> None:
    """The output names the VM's entry of `policy.overrides`, with its values."""
    own = a_policy(migration_cooldown=3600.0, count_failed_migrations=False)
    policy = a_policy(overrides=(Override(name="dbs", policy=own, namespaces=("shop",)),))
    vmi = explained(some_evidence(vmi=a_vmi(override="dbs")), policy=policy)
    assert (
        show_vmi(vmi, PIPED)
        .splitlines()[-1]
        .endswith("dbs: minimum 1h, maximum 6h, window 1d, failed migrations do not count")
    )


def test_blocked_evictions_are_listed_by_user() -> None:
    """Each user whose evictions were blocked is listed, with the number and the last time."""
    vmi = explained(
        cooling(),
        blocked_evictions=(
            BlockedEviction("descheduler", NOW - 7.0, Reason.COOLDOWN, denied=True, times=3),
            BlockedEviction("autoscaler", NOW - 70.0, Reason.COOLDOWN, denied=False),
        ),
    )
    section = show_vmi(vmi, PIPED).partition("Requested evictions\n")[2].splitlines()[:2]
    assert [re.sub(" +", " ", line) for line in section] == [
        " by descheduler 3 times, last 2027-01-15T07:59:53Z (7s ago) denied cooldown",
        " by autoscaler once 2027-01-15T07:58:50Z (1m10s ago) allowed with a warning cooldown",
    ]


FIRST_SENTENCES = {
    "never-moved": (
        some_evidence(vmi=a_vmi(**MIGRATABLE)),
        "may be moved now: no rule blocks it, and it has no known migration to cool down from.",
    ),
    "cooled-down": (
        some_evidence(
            vmi=a_vmi(**MIGRATABLE, migration=a_state(start=NOW - 7260.0, end=NOW - 7200.0))
        ),
        "may be moved now: no rule blocks it, and its last cooldown ended 1h45m ago.",
    ),
    "not-migratable": (
        some_evidence(vmi=a_vmi(eviction_strategy="LiveMigrate")),
        (
            "is blocked by no rule, but in a drain it never leaves: it is not migratable, and"
            " KubeVirt refuses its eviction."
        ),
    ),
    "goes-down": (
        some_evidence(vmi=a_vmi(eviction_strategy="None")),
        ("is blocked by no rule, but in a drain it goes down: its strategy is None."),
    ),
    "external": (
        some_evidence(vmi=a_vmi(eviction_strategy="External")),
        (
            "is blocked by no rule, but in a drain it waits for somebody else to move or stop it:"
            " strategy External."
        ),
    ),
    "migrating": (
        some_evidence(vmi=a_vmi(migration=a_running_state())),
        "may not be moved now: it has a migration that has not ended.",
    ),
    "ended": (
        some_evidence(vmi=a_vmi(phase="Failed", migration=a_running_state())),
        "has ended (Failed): there is nothing to move.",
    ),
    "evacuated-unseen": (
        an_evacuation(launcher=None),
        "is already being evacuated from n1, and no rule blocks it.",
    ),
}


@pytest.mark.parametrize(("evidence", "sentence"), FIRST_SENTENCES.values(), ids=FIRST_SENTENCES)
def test_the_first_sentence_answers(evidence: Evidence, sentence: str) -> None:
    """The first sentence says whether the VM may be moved, and if not, why."""
    assert show_vmi(explained(evidence), PIPED).splitlines()[0] == f"shop/db1 {sentence}"


def test_a_stuck_evacuation_is_explained() -> None:
    """For a stuck VM the next step comes first, and the cancel command comes later."""
    text = show_vmi(explained(stuck()), PIPED)

    assert text.startswith(
        """\
shop/db1 is stuck: its evacuation from n1 was requested 2h ago; failed attempts: at least 1.
  next step  Raise the ResourceQuota of the namespace: it refuses the target pod.
  runbook    KubeVirtEvacuationStuck#quota
    kubectl -n shop describe resourcequotas

shop/db1 may not be moved now: """
    )
    assert (
        """
Evacuation from n1
  state            quota: stuck by age
  requested        2027-01-15T06:00:00Z (2h ago), source unknown
  failed attempts  at least 1
  current attempt  kubevirt-evacuation-1: Pending, created 2027-01-15T07:59:50Z (10s ago)
  to cancel it  Cancelling needs KubeVirt 1.7, and a role that may update virtualmachineinstances"""
        "/evacuate and virtualmachineinstances/evacuate/cancel of subresources.kubevirt.io. Never"
        " cancel in post-copy, because that kills the VM.\n"
        '    echo \'{"evacuationNodeName":"n1"}\' | kubectl replace --raw'
        " /apis/subresources.kubevirt.io/v1"
        "/namespaces/shop/virtualmachineinstances/db1/evacuate/cancel -f -\n"
    ) in text


def test_the_command_that_cancels_is_printed_once() -> None:
    """The cancel command is printed once, even if it is also the next step."""
    answer = explained(stuck())
    evacuation = answer.evacuation
    assert evacuation is not None
    assert evacuation.cancel is not None
    left_over = replace(evacuation, command=evacuation.cancel.command)

    assert show_vmi(replace(answer, evacuation=left_over), PIPED).count("kubectl replace") == 1


def test_who_requested_an_evacuation() -> None:
    """The first sentence and the section of the evacuation name the requester."""
    alice = Requester(NOW - 7200.0, "alice")
    evidence = an_evacuation(age=7200.0, marker={"asked_by": alice, "failed": {"f1": NOW - 900.0}})
    text = show_vmi(explained(evidence), PIPED)

    assert text.startswith("shop/db1 is stuck: its evacuation from n1 was requested by alice 2h")
    assert "  requested        2027-01-15T06:00:00Z (2h ago) by alice, source unknown\n" in text


@pytest.mark.parametrize(("state", "is_told"), [("Active", True), ("Canceled", False)])
def test_only_an_active_responder_speaks(state: str, *, is_told: bool) -> None:
    """What a responder said is not told after it was cancelled, when it is true no longer."""
    request = EvictionRequestAnswer(
        requesters=[],
        since=None,
        responder="example.com/hold",
        state=state,
        message="held until noon",
        expected_completion_time=to_datetime(NOW + 60.0),
    )
    vmi = replace(explained(an_evacuation()), eviction_request=request)
    text = show_vmi(vmi, PIPED)

    assert f"example.com/hold, {state}" in text
    assert ("held until noon" in text) == is_told
    assert ("expected end" in text) == is_told


def test_the_cluster_s_own_words() -> None:
    """Each reason from the cluster is printed once, with source and age, the cause first."""
    stays = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "PVC db1 is not shared")
    failed = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Scheduling 5m", NOW - 60.0)
    evidence = an_evacuation(vmi={"migratable": False})
    text = show_vmi(explained(evidence, why=(stays, failed)), PIPED)

    assert "\n  cause      LiveMigratable, now: DisksNotLiveMigratable: PVC db1 is not" in text
    assert text.count("PVC db1 is not shared") == 1
    assert (
        """
What else the cluster says about it, newest first
  FailedAttempt  2027-01-15T07:59:00Z (1m ago)  Scheduling: after Scheduling 5m
"""
        in text
    )


def test_the_mode_of_a_running_migration() -> None:
    """The mode of a running migration is shown; for post-copy there is no cancel command."""
    running = an_evacuation(vmi={"migration": a_running_state(mode="PostCopy")})
    text = show_vmi(explained(running), PIPED)
    assert "\n  copies memory in  mode PostCopy\n" in text
    assert "to cancel it" not in text


def test_a_pause_and_a_divergence_are_told() -> None:
    """The output shows KubeVirt's backoff with its end, and that the evacuation has diverged."""
    pausing = an_evacuation(
        age=7200.0,
        vmims=(an_attempt(), a_failed_attempt(1, 5.0)),
        marker={"lacking_since": NOW - 600.0},
        pods=(a_pod(),),
    )
    text = show_vmi(explained(pausing), PIPED)

    assert "  KubeVirt waits   20s, next try in 15s\n" in text
    assert "  diverged         the descheduler considers it over, KubeVirt does not\n" in text


def test_doubts_come_right_after_the_sentence() -> None:
    """Warnings about stale evidence and blind spots follow the first sentence."""
    health = some_health(synced=False, rejected="forbidden by RBAC")
    text = show_vmi(explained(cooling(), now=NOW + 400.0, health=health), PIPED)
    first, second, third, *_ = text.splitlines()

    assert "may not be moved now" in first
    assert second == (
        "Warning: no contact with the API server since 2027-01-15T07:59:58Z (6m42s ago): this may"
        " be out of date."
    )
    assert third == (
        "Warning: virtualmachineinstancemigrations cannot be watched: forbidden by RBAC."
    )


def test_rules_that_are_off_or_silent_are_told() -> None:
    """Rules that are off or silent are shown as such."""
    off = explained(cooling(), policy=a_policy(guard_evacuations=False))
    dead = explained(cooling(), now=NOW + 3000.0)

    assert "\n  requested_evacuation  is off     " in show_vmi(off, PIPED)
    assert "\n  running_migration     is silent  " in show_vmi(dead, PIPED)


@pytest.mark.parametrize(
    ("ended", "row"),
    [
        pytest.param({"handed_off": False}, "no: never handed off", id="not-handed-off"),
        pytest.param({"end": NOW - 100_000.0}, "no", id="left-the-window"),
        pytest.param({"end": None}, "no", id="no-end"),
    ],
)
def test_migrations_that_do_not_count_are_told(ended: Mapping[str, Any], row: str) -> None:
    """Migrations that are not counted are shown with the reason."""
    evidence = some_evidence(history=a_history(m1=a_migration(**ended)))
    text = show_vmi(explained(evidence), PIPED)

    assert "Known migrations: 1, 0 of them counted" in text
    assert re.search(rf"  succeeded  {row}$", text, re.MULTILINE)


def test_a_migration_that_failed_says_why() -> None:
    """The outcome of a failed migration has its reason."""
    failed = a_migration(outcome=Outcome.FAILED, reason=EndReason.LIBVIRT, trigger=Trigger.MANUAL)
    text = show_vmi(explained(some_evidence(history=a_history(m1=failed))), PIPED)
    assert re.search(r"  manual  failed: libvirt  yes$", text, re.MULTILINE)


ARITHMETIC = {
    "doubled": ({}, 192.0, 2, "max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h"),
    "slow": ({}, 1800.0, 1, "max(15m, 30m) x 2^(1-1) = 30m, cap 6h"),
    "capped": ({}, 60.0, 7, "max(15m, 1m) x 2^(7-1) = 16h, capped at 6h"),
    "no-cap": ({"max_migration_cooldown": 0.0}, 60.0, 7, "max(15m, 1m) x 2^(7-1) = 16h, no cap"),
    "floor": ({"migration_cooldown": 0.0}, 60.0, 2, "1m (no floor) x 2^(2-1) = 2m, cap 6h"),
    "backoff": ({"migration_history_window": 0.0}, 60.0, 2, "max(15m, 1m) = 15m, cap 6h"),
}


@pytest.mark.parametrize(
    ("policy", "took", "ends", "written"),
    ARITHMETIC.values(),
    ids=ARITHMETIC,
)
def test_the_arithmetic_is_as_one_writes_it(
    policy: Mapping[str, Any], took: float, ends: int, written: str
) -> None:
    """The arithmetic shows the duration, and the floor, doubling and cap that the policy sets."""
    answer = explained(moved(ends, took), policy=a_policy(**policy))

    assert answer.cooldown is not None
    assert write_arithmetic(answer.cooldown, answer.policy) == written


def test_a_release_is_never_told_too_early() -> None:
    """A release is rounded up to a second, both as a time and as a remaining time."""
    state = a_state(start=NOW - 660.0, end=NOW - 600.0)
    answer = explained(some_evidence(vmi=a_vmi(migration=state)))
    answer.verdicts.pre_eviction.not_before = to_datetime(NOW + 1.5)

    assert "until 2027-01-15T08:00:02Z (in 2s)." in show_vmi(answer, PIPED)


def test_the_last_instant_is_told() -> None:
    """A release at the end of the year 9999 can be shown."""
    answer = explained(cooling())
    answer.verdicts.pre_eviction.not_before = datetime.max.replace(tzinfo=UTC)

    assert "until 9999-12-31T23:59:59Z" in show_vmi(answer, PIPED)
