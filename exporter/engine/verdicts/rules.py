"""The rules that decide whether a VMI may be evicted now, in the order in which they are tried.

A verdict is a pure function of what the cluster showed (`Evidence`), the operator's policy and an
instant. A VMI is allowed unless there is evidence to block it.

There are two checkpoints, as in the descheduler: `filter` decides whether a pod may be a candidate,
`preEviction` whether it may be evicted right now. If a request names no checkpoint, all rules
apply. The first rule that blocks gives the reason:

1. running migration (filter): `status.migrationState` has a start and no end. An end that cannot be
   read means that the migration has ended: the VMI is neither migrating nor cooling down. With the
   guard on, a start is not believed if the VMIM of that UID finished at least `kube.deadAfter` ago.
2. pending migration (filter, guard): an unfinished VMIM belongs to the VMI. This covers the time
   before hand-off, and the time between hand-off and start, when KubeVirt's
   `handleTargetPodHandoff` has replaced the old struct by an empty one without start and end.
3. requested evacuation (filter, guard): `status.evacuationNodeName` is the VMI's current node, and
   its launcher pod is known to lack the descheduler's own annotation `eviction-in-progress`. With
   that annotation the answer is "allowed": the descheduler's request cache already counts the pod,
   and blocking it would make the descheduler choose another VM instead.
4. platform update (filter, guard, off by default): KubeVirt reports VMIs that it still has to
   update (`outdatedVirtualMachineInstanceWorkloads`), and migrates them itself.
5. policy (preEviction): the VMI's entry in `policy.overrides` has `block: true`.
6. cooldown (preEviction): the last migration ended less than the effective cooldown ago, see
   `cooldown`.

A VMI that has ended (phase Succeeded or Failed) is allowed by every rule. There is nothing to
migrate, but its status still shows its last migration and evacuation.

Each rule lists the resources that it `needs`. If the watch of such a resource had no contact for
too long (it is dead), the rule does not block. The same is true if one of the VMI's own
objects could not be read for that long. The cooldown needs no resource, because it ends as time
passes.
"""

from collections.abc import Callable

from msgspec import Struct

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Checkpoint, Instant, Mismatch, Resource
from exporter.engine.facts.policy import Policy, PolicyValues, Reason, Verdict
from exporter.engine.verdicts.cooldown import Cooldown, list_counted, measure_cooldown


class Rule(Struct, frozen=True, kw_only=True):
    """One rule. It blocks no ended VMI, and no VMI while a resource that it `needs` is dead."""

    name: str
    reason: Reason
    checkpoint: Checkpoint
    needs: frozenset[Resource] = frozenset()
    enabled: Callable[[PolicyValues], bool] = lambda _policy: True
    blocks_idle: Callable[[bool], bool] | None = None
    """Set if the rule can block a VMI that was never moved: whether it does so while KubeVirt is
    updating VMs, and while it is not."""
    blocks: Callable[[Evidence, Cooldown | None, PolicyValues, Instant], bool]


class RuleResult(Struct, frozen=True, kw_only=True):
    """The result of one rule for one VMI, to explain a verdict."""

    rule: str
    reason: Reason
    checkpoint: Checkpoint
    enabled: bool
    silenced: bool
    blocks: bool


def decide_both(
    evidence: Evidence, policy: PolicyValues, now: Instant
) -> tuple[Verdict, Verdict, Cooldown | None]:
    """The verdicts at `filter` and `preEviction`, and the cooldown that they are based on."""
    cooldown = measure_cooldown(evidence, policy, now)
    dead = evidence.dead_at(now)
    if cooldown is None:
        effective, counted = None, len(list_counted(evidence, policy, now))
    else:
        effective, counted = cooldown.effective, cooldown.migrations_in_window
    allowed = Verdict(known=True, effective_cooldown=effective, migrations_in_window=counted)

    def apply(rules: tuple[Rule, ...]) -> Verdict:
        for rule in rules:
            if _blocks(rule, evidence, cooldown, policy, now, dead=dead):
                active = cooldown if rule.reason is Reason.COOLDOWN else None
                return Verdict(
                    known=True,
                    checkpoint=rule.checkpoint,
                    reason=rule.reason,
                    not_before=None if active is None else active.not_before,
                    released_at=None if active is None else active.released_at,
                    effective_cooldown=effective,
                    migrations_in_window=counted,
                )
        return allowed

    return apply(_FILTER_RULES), apply(_PRE_EVICTION_RULES), cooldown


def list_reasons(policy: Policy) -> tuple[Reason, ...]:
    """The reasons for which this policy may block, in the order of the rules."""
    return tuple(
        dict.fromkeys(
            rule.reason
            for rule in RULES
            if rule.enabled(_DEFAULT) or any(map(rule.enabled, policy.all))
        )
    )


def not_ours(mismatch: Mismatch) -> Verdict:
    """The verdict for a candidate that is not a VMI of this cluster: allowed."""
    return Verdict(known=False, mismatch=mismatch)


def evaluate_rules(evidence: Evidence, policy: PolicyValues, now: Instant) -> list[RuleResult]:
    """Evaluate every rule in order, even after a rule that blocks.

    A rule that is off by default is evaluated only if it is on.
    """
    cooldown = measure_cooldown(evidence, policy, now)
    dead = evidence.dead_at(now)
    return [
        RuleResult(
            rule=rule.name,
            reason=rule.reason,
            checkpoint=rule.checkpoint,
            enabled=rule.enabled(policy),
            silenced=not rule.needs.isdisjoint(dead),
            blocks=_blocks(rule, evidence, cooldown, policy, now, dead=dead),
        )
        for rule in RULES
        if rule.enabled(policy) or rule.enabled(_DEFAULT)
    ]


def _blocks(
    rule: Rule,
    evidence: Evidence,
    cooldown: Cooldown | None,
    policy: PolicyValues,
    now: Instant,
    *,
    dead: frozenset[Resource],
) -> bool:
    if evidence.vmi.finished or not rule.enabled(policy) or not rule.needs.isdisjoint(dead):
        return False
    return rule.blocks(evidence, cooldown, policy, now)


def _is_running(
    evidence: Evidence, _cooldown: Cooldown | None, policy: PolicyValues, now: Instant
) -> bool:
    state = evidence.vmi.migration
    if state is None or not state.running:
        return False
    return not (policy.guard_pending_migrations and evidence.is_contradicted(now))


def _is_requested(
    evidence: Evidence, _cooldown: Cooldown | None, _policy: PolicyValues, _now: Instant
) -> bool:
    vmi, launcher = evidence.vmi, evidence.launcher
    is_marked = bool(vmi.evacuation_node) and vmi.evacuation_node == vmi.node
    return is_marked and launcher is not None and not launcher.eviction_in_progress


RULES: tuple[Rule, ...] = (
    Rule(
        name="running_migration",
        reason=Reason.MIGRATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS}),
        blocks=_is_running,
    ),
    Rule(
        name="pending_migration",
        reason=Reason.MIGRATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS, Resource.VMIMS}),
        enabled=lambda policy: policy.guard_pending_migrations,
        blocks=lambda evidence, _cooldown, _policy, _now: evidence.unfinished() is not None,
    ),
    Rule(
        name="requested_evacuation",
        reason=Reason.EVACUATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS, Resource.PODS}),
        enabled=lambda policy: policy.guard_evacuations,
        blocks=_is_requested,
    ),
    Rule(
        name="platform_update",
        reason=Reason.PLATFORM_UPDATE,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS, Resource.KUBEVIRTS}),
        enabled=lambda policy: policy.guard_platform_update,
        blocks_idle=lambda updating: updating,
        blocks=lambda evidence, _cooldown, _policy, _now: evidence.platform_updating,
    ),
    Rule(
        name="policy",
        reason=Reason.POLICY,
        checkpoint=Checkpoint.PRE_EVICTION,
        needs=frozenset({Resource.VMIS}),
        enabled=lambda policy: policy.block,
        blocks_idle=lambda _updating: True,
        blocks=lambda _evidence, _cooldown, _policy, _now: True,
    ),
    Rule(
        name="cooldown",
        reason=Reason.COOLDOWN,
        checkpoint=Checkpoint.PRE_EVICTION,
        blocks=lambda _evidence, cooldown, _policy, _now: cooldown is not None and cooldown.blocks,
    ),
)
_DEFAULT = Policy()
_FILTER_RULES, _PRE_EVICTION_RULES = (
    tuple(rule for rule in RULES if rule.checkpoint is checkpoint)
    for checkpoint in (Checkpoint.FILTER, Checkpoint.PRE_EVICTION)
)
