"""The API's answers about a VMI."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from exporter.counters import BlockedEviction, PreventedMoves
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.drain import Forecast, Snapshot
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import Evidence, RequestedThrough
from exporter.engine.facts.history import History
from exporter.engine.facts.model import (
    Checkpoint,
    EndReason,
    MigrationState,
    Outcome,
    Requester,
    Resource,
    Trigger,
    Why,
)
from exporter.engine.facts.policy import Override, Policy, Reason, StuckPolicy
from exporter.engine.facts.trust import DEAD_AFTER, NamespaceTrust
from exporter.engine.store.node_drains import DrainProgress
from exporter.engine.verdicts.rules import list_reasons
from exporter.engine.verdicts.view import evaluate
from exporter.health import Health, Staleness
from exporter.server.api.answers import (
    EvacuationList,
    describe_status,
    write_node,
    write_verdict,
)
from exporter.server.api.evacuation_schemas import (
    BackoffAnswer,
    DrainProgressAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
)
from exporter.server.api.explanation import explain_vmi
from exporter.server.api.schemas import (
    ResourceAnswer,
    RuleAnswer,
    StatusAnswer,
    VmiAnswer,
)
from exporter.text import to_datetime
from tests.support.builders import (
    KEEP,
    NAMESPACE,
    NOW,
    a_cordon,
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
from tests.support.verdicts import decide
from tests.unit.engine.evacuations.test_diagnosis import a_failed_attempt, an_attempt, an_evacuation
from tests.unit.server.api.test_handlers import a_health


def some_health(**overrides: Any) -> Health:
    """A health with its last contact two seconds ago; `overrides` change the watch of VMIMs."""
    health = a_health(contact=NOW - 2.0)
    for name, value in overrides.items():
        setattr(health.watched[1], name, value)
    return health


def explained(
    evidence: Evidence,
    policy: Policy | None = None,
    *,
    now: float = NOW,
    health: Health | None = None,
    why: tuple[Why, ...] = (),
    blocked_evictions: Sequence[BlockedEviction] = (),
) -> VmiAnswer:
    """The explanation of this evidence; by default with the default policy and recent contact."""
    policy, health = policy or a_policy(), health or some_health()
    conditions = some_conditions(health, now)
    dead = conditions.trust.of(evidence.vmi.namespace).dead
    evidence = replace(evidence, trust=replace(evidence.trust, dead=dead))
    return explain_vmi(
        evaluate(evidence, policy, now),
        policy,
        conditions,
        health,
        why=why,
        blocked_evictions=blocked_evictions,
    )


def some_conditions(health: Health, now: float) -> Conditions:
    """The conditions of a diagnosis without the KubeVirt object."""
    trust = health.read_trust(now)
    return Conditions(kubevirt=None, load=None, stuck=StuckPolicy(), trust=trust, now=now)


def listed(*unsettled: Evidence) -> EvacuationsAnswer:
    """The answer about these unsettled VMIs."""
    health = some_health()
    conditions = some_conditions(health, NOW)
    snapshot = Snapshot(
        conditions=conditions, mobilities={}, unsettled=unsettled, guarded=(), drains={}
    )
    evacuation_list = EvacuationList(snapshot, health, reasons=lambda _vmi: ())
    for _ in evacuation_list:
        pass
    return evacuation_list.answer()


def evacuated(evidence: Evidence) -> EvacuationAnswer:
    """The answer about one evacuation."""
    (evacuation,) = listed(evidence).evacuations
    return evacuation


def moved(times: int, took: float) -> Evidence:
    """Evidence of a VMI that was moved this many times, the last time ten minutes ago."""
    last = a_migration(start=NOW - 600.0 - took, end=NOW - 600.0)
    older = {f"m{n}": a_migration(end=NOW - 700.0 - n - took) for n in range(1, times)}
    return some_evidence(
        vmi=a_vmi(migration=a_state(uid="m0", start=last.start)),
        history=a_history(m0=last, **older),
    )


def rule(answer: VmiAnswer, name: str) -> RuleAnswer:
    """One rule of the explanation."""
    return next(rule for rule in answer.rules if rule.rule == name)


LEAVES = {"vmi": a_vmi(evacuation_node="n1")}


class TestVerdict:
    """A verdict in JSON."""

    def test_an_allowed_vmi_has_its_cooldown(self) -> None:
        """An allowed VMI still has its effective cooldown."""
        state = a_state(start=NOW - 5060.0, end=NOW - 5000.0)
        verdict = decide(some_evidence(vmi=a_vmi(migration=state)), a_policy(), NOW)
        answer = write_verdict("shop", "db1", verdict, NOW)

        assert answer.allowed
        assert answer.effective_cooldown_seconds == 900.0
        assert (answer.not_before, answer.retry_after_seconds) == (None, None)

    @pytest.mark.parametrize(("later", "wait"), [(0.0, 0.5), (1.0, 0.0)])
    def test_the_wait_of_less_than_a_second(self, later: float, wait: float) -> None:
        """`retryAfterSeconds` is the rest of the cooldown, and never negative."""
        state = a_state(start=NOW - 960.5, end=NOW - 899.5)
        verdict = decide(some_evidence(vmi=a_vmi(migration=state)), a_policy(), NOW)
        assert write_verdict("shop", "db1", verdict, NOW + later).retry_after_seconds == wait

    @given(
        floor=st.floats(0.001, 40_000.0),
        elapsed=st.floats(0.0, 40_000.0),
        took=st.floats(0.0, 9_000.0),
    )
    def test_after_the_wait_it_is_allowed(self, floor: float, elapsed: float, took: float) -> None:
        """At `notBefore` and after `retryAfterSeconds` the VM is allowed."""
        policy = a_policy(migration_cooldown=floor, max_migration_cooldown=0.0)
        state = a_state(start=NOW - elapsed - took, end=NOW - elapsed)
        evidence = some_evidence(vmi=a_vmi(migration=state))
        answer = write_verdict("shop", "db1", decide(evidence, policy, NOW), NOW)
        if answer.allowed:
            return

        assert answer.not_before is not None
        assert answer.retry_after_seconds is not None
        not_before = answer.not_before.timestamp()
        assert decide(evidence, policy, not_before).allowed
        assert decide(evidence, policy, NOW + answer.retry_after_seconds).allowed


class TestExplanation:
    """The explanation of one VMI."""

    def test_has_the_arithmetic_of_the_cooldown(self) -> None:
        """The explanation has the base, backoff, cap and release after three migrations."""
        state = a_state(uid="m3", start=NOW - 1800.0, end=NOW - 600.0)
        history = a_history(
            m1=a_migration(end=NOW - 40_000.0, start=NOW - 40_060.0),
            m2=a_migration(end=NOW - 20_000.0, start=NOW - 20_060.0),
            m3=a_migration(start=NOW - 1800.0, end=NOW - 600.0),
        )
        answer = explained(
            some_evidence(vmi=a_vmi(migration=state), history=history),
            a_policy(max_migration_cooldown=3600.0),
        )

        cooldown = answer.cooldown
        assert cooldown is not None
        assert cooldown.ended_at == to_datetime(NOW - 600)
        assert cooldown.duration_seconds == 1200.0
        assert cooldown.migrations_in_window == 3
        assert cooldown.base_seconds == 1200.0
        assert cooldown.backed_off_seconds == 4800.0
        assert cooldown.effective_seconds == 3600.0
        assert cooldown.not_before == to_datetime(NOW + 3000)
        assert rule(answer, "cooldown").why == (
            "migrations in the window: 3; base 20m, backed off to 1h20m, capped to 1h, from"
            " 2027-01-15T07:50:00Z on"
        )

    @pytest.mark.parametrize(
        ("policy", "took", "ends", "text"),
        [
            pytest.param({}, 60.0, 1, "migrations in the window: 1; base 15m, from", id="base"),
            pytest.param(
                {}, 1280.0, 1, "migrations in the window: 1; base 21m20s, from", id="duration"
            ),
            pytest.param(
                {},
                60.0,
                2,
                "migrations in the window: 2; base 15m, backed off to 30m, from",
                id="backed",
            ),
            pytest.param(
                {"max_migration_cooldown": 1000.0},
                1280.0,
                1,
                "migrations in the window: 1; base 21m20s, capped to 16m40s, from",
                id="capped-alone",
            ),
            pytest.param(
                {"max_migration_cooldown": 0.0},
                60.0,
                7,
                "migrations in the window: 7; base 15m, backed off to 16h, from",
                id="no-cap",
            ),
        ],
    )
    def test_names_backoff_and_cap_only_if_they_act(
        self, policy: dict[str, float], took: float, ends: int, text: str
    ) -> None:
        """Backoff and cap are mentioned only where they change the cooldown."""
        answer = explained(moved(ends, took), a_policy(**policy))

        assert rule(answer, "cooldown").why == f"{text} 2027-01-15T07:50:00Z on"

    def test_has_the_cooldown_in_milliseconds(self) -> None:
        """Each duration of the cooldown is rounded to the millisecond."""
        policy = a_policy(migration_cooldown=900.03125, max_migration_cooldown=0.0)
        cooldown = explained(moved(2, 60.0625), policy).cooldown

        assert cooldown is not None
        assert (cooldown.duration_seconds, cooldown.base_seconds) == (60.062, 900.031)
        assert (cooldown.backed_off_seconds, cooldown.effective_seconds) == (1800.062, 1800.062)

    def test_says_since_when_an_object_is_unreadable(self) -> None:
        """Of several objects that cannot be read, the first one counts."""
        unreadable = ((Resource.VMIS, NOW - 60.0), (Resource.PODS, NOW - 90.0))
        answer = explained(some_evidence(unreadable=unreadable))

        assert answer.unreadable_since == to_datetime(NOW - 90)
        assert explained(some_evidence()).unreadable_since is None

    def test_has_the_diagnosis_of_an_evacuation_or_of_another_move(self) -> None:
        """The verdicts say whether the evacuation is stuck, or the move without one."""
        hangs = a_vmim(phase="Scheduled", scheduled_at=NOW - 9000.0)
        for evidence, evacuating in (
            (an_evacuation(age=9000.0), True),
            (some_evidence(vmims=(hangs,)), False),
        ):
            answer = explained(evidence)
            verdict = answer.verdicts.filter
            assert (verdict.evacuating, verdict.stuck) == (evacuating, True)
            assert (answer.evacuation is not None, answer.move is not None) == (
                evacuating,
                not evacuating,
            )

    def test_names_the_exception_that_applies(self) -> None:
        """The policy is that of the VM's entry in `policy.overrides`, and has its name."""
        own = Override(name="own", namespaces=(NAMESPACE,), policy=a_policy(block=True))
        policy = a_policy(overrides=(own,))

        policy_answer = explained(some_evidence(vmi=a_vmi(override="own")), policy).policy
        assert (policy_answer.override, policy_answer.block) == ("own", True)
        assert explained(some_evidence(), policy).policy.override is UNSET

    def test_lists_no_migration_that_has_not_begun(self) -> None:
        """A migration that was handed off and has neither a start nor an end is not listed."""
        history = a_history(
            m1=a_migration(start=None, end=None, outcome=Outcome.UNKNOWN),
            m2=a_migration(start=None),
            m3=a_migration(end=None),
        )
        answer = explained(some_evidence(history=history))

        assert [migration.uid for migration in answer.migrations] == ["m3", "m2"]

    def test_agrees_with_the_verdicts(self) -> None:
        """The explanation has the verdicts of both checkpoints and the rules that cause them."""
        evidence = some_evidence(vmi=a_vmi(migration=a_state()), vmims=(a_vmim(uid="m2"),))
        answer = explained(evidence)

        for checkpoint, verdict_answer in (
            (Checkpoint.FILTER, answer.verdicts.filter),
            (Checkpoint.PRE_EVICTION, answer.verdicts.pre_eviction),
        ):
            verdict = decide(evidence, a_policy(), NOW, checkpoint=checkpoint)
            blocking = [r for r in answer.rules if r.blocks and r.checkpoint is checkpoint]
            assert verdict_answer == write_verdict("shop", "db1", verdict, NOW, drain=answer.drain)
            assert verdict_answer.reason == blocking[0].reason
            assert not verdict_answer.allowed

    @pytest.mark.parametrize(
        ("name", "blocks", "facts", "why"),
        [
            ("running_migration", False, {}, "no migrationState"),
            (
                "running_migration",
                True,
                {"vmi": a_vmi(migration=a_running_state())},
                "startTimestamp is 2027-01-15T07:59:00Z and there is no endTimestamp",
            ),
            (
                "running_migration",
                False,
                {"vmi": a_vmi(migration=a_state())},
                "endTimestamp is 2027-01-15T07:50:00Z",
            ),
            (
                "running_migration",
                False,
                {"vmi": a_vmi(migration=a_state(ended=True, end=None))},
                "endTimestamp is unreadable",
            ),
            (
                "running_migration",
                False,
                {"vmi": a_vmi(migration=a_running_state(start=None))},
                "no startTimestamp",
            ),
            ("pending_migration", True, {"vmims": (a_vmim(),)}, "VMIM mig-1 is Pending"),
            ("pending_migration", True, {"vmims": (a_vmim(phase=""),)}, "VMIM mig-1 is new"),
            ("pending_migration", False, {"vmims": (an_ended_vmim(),)}, "no unfinished VMIM"),
            (
                "pending_migration",
                False,
                {"trust": NamespaceTrust(frozenset({Resource.VMIMS}))},
                "cannot watch VMIMs",
            ),
            (
                "requested_evacuation",
                True,
                LEAVES,
                "virt-launcher-db1-x lacks eviction-in-progress",
            ),
            (
                "requested_evacuation",
                False,
                LEAVES | {"launcher": a_pod(eviction_in_progress=True)},
                "the descheduler knows of this",
            ),
            ("requested_evacuation", False, LEAVES | {"launcher": None}, "pod is unknown"),
            (
                "requested_evacuation",
                False,
                {"vmi": a_vmi(evacuation_node="n9")},
                "evacuationNodeName is n9, the VMI is on n1",
            ),
            ("requested_evacuation", False, {}, "is not set"),
            ("cooldown", False, {}, "no migration that counts has ended"),
            (
                "cooldown",
                False,
                {"vmi": a_vmi(migration=a_running_state(start=None))},
                "no migration that counts has ended",
            ),
            (
                "cooldown",
                False,
                {"vmi": a_vmi(migration=a_running_state())},
                "not asked while a migration runs",
            ),
        ],
    )
    def test_says_why(self, name: str, blocks: bool, facts: dict[str, Any], why: str) -> None:
        """Each rule names the facts that explain its result."""
        answer = rule(explained(some_evidence(**facts)), name)

        assert answer.blocks is blocks
        assert why in answer.why

    @pytest.mark.parametrize(
        ("ended", "doubting"),
        [(NOW - 60.0, []), (NOW - DEAD_AFTER, ["running_migration"])],
        ids=["just-now", "long-ago"],
    )
    def test_says_that_a_start_is_not_believed(self, ended: float, doubting: list[str]) -> None:
        """If the VMIM of a running migration ended long ago, only the rule about it says so."""
        history = a_history(m1=a_migration(start=NOW - 900.0, end=None, finished_at=ended))
        answer = explained(some_evidence(vmi=a_vmi(migration=a_running_state()), history=history))

        assert [rule.rule for rule in answer.rules if "its VMIM ended" in rule.why] == doubting
        assert rule(answer, "running_migration").blocks is not bool(doubting)

    def test_says_that_a_vmi_has_ended(self) -> None:
        """If a VMI has ended, every rule says so."""
        answer = explained(some_evidence(vmi=a_vmi(phase="Succeeded", migration=a_state())))

        assert (answer.phase, answer.cooldown) == ("Succeeded", None)
        assert [rule.why for rule in answer.rules] == [
            "the VMI has stopped (phase Succeeded): nothing is left to move"
        ] * 4

    def test_says_that_a_guard_is_off(self) -> None:
        """A guard that the policy turns off says so and does not block."""
        policy = a_policy(guard_pending_migrations=False)
        answer = rule(explained(some_evidence(vmims=(a_vmim(),)), policy), "pending_migration")

        assert not answer.enabled
        assert not answer.blocks
        assert "policy.guards" in answer.why

    def test_says_that_dead_evidence_does_not_block(self) -> None:
        """With dead evidence only the cooldown can block."""
        evidence = some_evidence(vmi=a_vmi(migration=a_running_state(), evacuation_node="n1"))
        health = some_health()
        for watched in health.watched:
            watched.contact = NOW - 780.0
        answer = explained(evidence, health=health)

        assert answer.stale
        assert answer.verdicts.filter.allowed
        assert [rule.rule for rule in answer.rules if not rule.silenced] == ["cooldown"]
        assert "a watch it needs is dead" in rule(answer, "running_migration").why

    def test_has_the_facts(self) -> None:
        """The explanation has the VMI, its launcher pod, its unfinished VMIMs and the policy."""
        evidence = some_evidence(
            vmi=a_vmi(evacuation_node="n1"),
            vmims=(a_vmim(handed_off=True), an_ended_vmim(name="old", uid="m0")),
        )
        answer = explained(evidence, a_policy(guard_evacuations=False))

        assert answer.observed_at == to_datetime(NOW - 2)
        assert answer.as_of == to_datetime(NOW)
        assert (answer.vmi_uid, answer.node, answer.evacuation_node_name) == (
            "uid-of-db1",
            "n1",
            "n1",
        )
        assert [(vmim.name, vmim.handed_off) for vmim in answer.pending_migrations] == [
            ("mig-1", True)
        ]
        assert answer.launcher is not None
        assert answer.launcher.name == "virt-launcher-db1-x"
        assert answer.policy.migration_cooldown == 900.0
        assert not answer.policy.guard_evacuations

    def test_orders_the_migrations_by_their_ends(self) -> None:
        """Migrations are sorted by their ends, the oldest first."""
        history = a_history(
            m1=a_migration(end=NOW - 5.0),
            m2=a_migration(end=NOW - 5.5),
            m3=a_migration(end=None, start=NOW - 1.0),
        )
        answer = explained(some_evidence(history=history))

        assert [migration.uid for migration in answer.migrations] == ["m2", "m1", "m3"]

    def test_says_where_a_migration_went_and_who_asked_for_it(self) -> None:
        """Nodes, trigger, reason and requester of a migration are null where they are unknown."""
        move = {
            "source_node": "n1",
            "target_node": "n2",
            "trigger": Trigger.MANUAL,
            "reason": EndReason.LIBVIRT,
            "requested_by": Requester(NOW, "alice"),
        }
        history = a_history(m1=a_migration(end=NOW - 5.0), m2=a_migration(**move))
        answer = to_builtins(explained(some_evidence(history=history)))
        known, unknown = answer["migrations"]
        fields = ("sourceNode", "targetNode", "trigger", "reason", "requestedBy")
        by = {"user": "alice", "at": "2027-01-15T08:00:00Z"}
        assert [known[field] for field in fields] == ["n1", "n2", "manual", "libvirt", by]
        assert [unknown[field] for field in fields] == [None] * 5

    def test_has_a_migration_without_uid(self) -> None:
        """A migration without UID is listed and counted."""
        history = History()
        history.put("", a_migration(), keep=KEEP)
        answer = explained(some_evidence(history=history))

        assert [(vmim.uid, vmim.in_window) for vmim in answer.migrations] == [(None, True)]

    @given(
        st.lists(
            st.builds(
                dict,
                uid=st.sampled_from(["", "m1", "m2", "m3"]),
                end=st.one_of(
                    st.none(),
                    st.sampled_from(
                        [NOW - 90_000.0, NOW - 60.0, NOW - 30.0, NOW + 100.0, NOW + 900.0]
                    ),
                ),
                finished_at=st.sampled_from([None, NOW - 60.0, NOW - 20.0]),
                outcome=st.sampled_from(Outcome),
                handed_off=st.booleans(),
            ),
            max_size=6,
        ),
        st.booleans(),
    )
    def test_marks_as_many_migrations_as_it_counts(
        self,
        rows: list[dict[str, Any]],
        count_failed: bool,
    ) -> None:
        """The number of migrations with `inWindow` equals the verdict's count."""
        policy = a_policy(count_failed_migrations=count_failed)
        history = History()
        for fields in rows:
            uid = fields.pop("uid")
            history.put(uid, a_migration(**fields), keep=KEEP)
        evidence = some_evidence(history=history)
        answer = explained(evidence, policy)

        marked = [migration for migration in answer.migrations if migration.in_window]
        assert len(marked) == answer.verdicts.filter.migrations_in_window
        assert all(migration.handed_off for migration in marked)
        assert len(answer.migrations) == len(history)


class TestEvacuations:
    """Evacuations, and stuck moves."""

    @pytest.mark.parametrize(
        ("state", "mode", "cancels"),
        [
            pytest.param(None, None, True, id="none"),
            pytest.param(a_running_state(), None, True, id="unknown"),
            pytest.param(a_running_state(mode="PreCopy"), "PreCopy", True, id="pre-copy"),
            pytest.param(a_running_state(mode="PostCopy"), "PostCopy", False, id="post-copy"),
            pytest.param(a_state(mode="PostCopy"), None, True, id="ended"),
        ],
    )
    def test_how_a_migration_copies(
        self, state: MigrationState | None, mode: str | None, cancels: bool
    ) -> None:
        """The mode is that of a running migration; in post-copy no step is to cancel."""
        evacuation = evacuated(an_evacuation(vmi={"migration": state}))
        assert (evacuation.mode, evacuation.cancel is not None) == (mode, cancels)

    def test_a_drain_by_taint_cannot_be_cancelled(self) -> None:
        """KubeVirt refuses to cancel an evacuation as long as the node has the taint."""
        evacuation = evacuated(an_evacuation(marker={"through": RequestedThrough.TAINT}))
        assert evacuation.cancel is None

    def test_its_attempt_and_the_pause_before_it(self) -> None:
        """An evacuation has its unfinished VMIM, and until when KubeVirt pauses."""
        failed, waits = a_failed_attempt(1, 12.0), an_attempt()
        evacuation = evacuated(an_evacuation(age=200.0, vmims=(failed, waits)))
        assert evacuation.attempt is not None
        assert (evacuation.attempt.name, evacuation.attempt.created_at) == (
            waits.name,
            to_datetime(NOW - 10),
        )
        assert evacuation.backoff == BackoffAnswer(seconds=20.0, next_try_at=to_datetime(NOW + 8))
        assert evacuated(an_evacuation()).attempt is None
        assert evacuated(an_evacuation()).backoff is None

    @pytest.mark.parametrize(("age", "shown"), [(1.0625, 1.062), (0.25, 0.25), (-9.0, 0.0)])
    def test_its_age_in_milliseconds(self, age: float, shown: float) -> None:
        """The age has milliseconds, and is zero if the request is ahead of our clock."""
        assert evacuated(an_evacuation(age=age)).age_seconds == shown

    def test_the_oldest_comes_first(self) -> None:
        """Evacuations and stuck moves are sorted by age; a move without a date comes last."""
        evacuations = [
            an_evacuation(age=age, vmi={"name": name, "uid": name})
            for name, age in (("a", 60.0), ("c", 90.0), ("b", 90.0))
        ]
        moves = [
            some_evidence(
                vmi=a_vmi(name=name, uid=name),
                vmims=(a_vmim(created=at, phase="Scheduled", scheduled_at=NOW - 9000.0),),
            )
            for name, at in (("e", None), ("d", NOW - 9000.0), ("f", NOW - 9100.0))
        ]
        settled = some_evidence(vmims=(a_vmim(),))
        answer = listed(*moves, settled, *evacuations)
        assert [evacuation.name for evacuation in answer.evacuations] == ["b", "c", "a"]
        assert [(stuck_move.name, stuck_move.stuck) for stuck_move in answer.stuck_moves] == [
            ("f", True),
            ("d", True),
            ("e", True),
        ]


class TestNode:
    """The forecast of one node."""

    def test_has_the_node_and_the_progress_of_its_drain(self) -> None:
        """The forecast has the date of the cordon, and the pace of the drain."""
        progress = DrainProgress(
            since=NOW - 60.0,
            left=3,
            remaining=2,
            failing=1,
            external=0,
            last_left_at=NOW - 1.0,
            seconds_per_vmi=7.0625,
            estimate=14.125,
            stuck=False,
        )
        forecast = Forecast(
            node="n1",
            outcomes={DrainOutcome.LEAVES: 2},
            at_least=60.0,
            progress=progress,
            schedulable=False,
            facts=a_cordon(conditions=("MaintenancePlanned",)),
        )
        answer = write_node(forecast)
        assert (answer.leaves, answer.waits, answer.vmis) == (2, 0, 2)
        assert answer.cordoned_at == to_datetime(NOW - 300)
        assert answer.conditions == ("MaintenancePlanned",)
        assert answer.drain == DrainProgressAnswer(
            since=to_datetime(NOW - 60),
            asked=5,
            left=3,
            remaining=2,
            failing=1,
            external=0,
            last_left_at=to_datetime(NOW - 1),
            seconds_per_vmi=7.062,
            estimate_seconds=14.125,
            requested_by=None,
        )


def status_of(
    health: Health, *, vmis: int = 0, blocked: Mapping[Reason, int] = MappingProxyType({})
) -> StatusAnswer:
    """The status with this many VMIs."""
    return describe_status(
        health,
        vmis=vmis,
        drain={},
        blocked=blocked,
        reasons=list_reasons(Policy()),
        prevented=PreventedMoves(),
        started_at=NOW,
        now=NOW,
    )


class TestStatus:
    """The exporter's status."""

    def test_has_the_state_of_each_watch(self) -> None:
        """The status says for each watch whether it is synced or forbidden, and its last error."""
        health = some_health(
            synced=False, rejected="forbidden", trouble="cut", contact=None, invalid_objects=3
        )
        answer = status_of(health)

        assert answer.resources[1] == ResourceAnswer(
            resource=Resource.VMIMS,
            namespace=None,
            synced=False,
            rejected="forbidden",
            trouble="cut",
            contact_at=None,
            invalid_objects=3,
        )
        assert answer.resources[0].contact_at == answer.observed_at == to_datetime(NOW - 2)
        assert (answer.resources[0].rejected, answer.resources[0].trouble) == (None, None)
        assert answer.blind_spots == {"virtualmachineinstancemigrations": "forbidden"}
        assert (answer.ready, answer.staleness) == (True, Staleness.FRESH)

    def test_counts_vms(self) -> None:
        """VMs are counted as allowed or by the reason that blocks them."""
        held = {Reason.MIGRATION_IN_PROGRESS: 1, Reason.COOLDOWN: 1}
        counts = status_of(some_health(), vmis=5, blocked=held).vmis

        assert counts is not None
        assert (counts.known, counts.allowed) == (5, 3)
        assert counts.blocked == {**held, Reason.EVACUATION_IN_PROGRESS: 0}
        assert counts.drain == dict.fromkeys(DrainOutcome, 0)
