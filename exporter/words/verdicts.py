"""Why a VMI may not be moved now, in words: the reasons, and the result of each rule."""

from collections.abc import Callable
from typing import NamedTuple

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Resource, Seconds
from exporter.engine.facts.policy import (
    COOLDOWN_DURATIONS,
    COOLDOWN_VALUES,
    PolicyValues,
    Reason,
)
from exporter.engine.verdicts.cooldown import Cooldown
from exporter.engine.verdicts.rules import RuleResult
from exporter.text import write_instant, write_span


class ReasonWords(NamedTuple):
    """The words for one reason.

    `meaning` completes "blocks while", and may be Markdown. `held` completes "the VM may not be
    moved now, because". `until` says until when it blocks. `name` is a noun.
    """

    meaning: str
    held: str
    until: str
    name: str


REASONS = {
    Reason.MIGRATION_IN_PROGRESS: ReasonWords(
        meaning="`migrationState` has a start and no end; or, with the guard `pendingMigrations`,"
        " an unfinished VMIM belongs to the VMI",
        held="it has a migration that has not ended",
        until="the migration ends",
        name="a migration in progress",
    ),
    Reason.EVACUATION_IN_PROGRESS: ReasonWords(
        meaning="with the guard `evacuations`: the VM is being evacuated from its node, and the"
        " exporter has seen that its launcher pod lacks the descheduler's annotation"
        " `eviction-in-progress`",
        held="it is being evacuated, and that has to end first",
        until="the evacuation ends",
        name="an evacuation in progress",
    ),
    Reason.PLATFORM_UPDATE: ReasonWords(
        meaning="with the guard `platformUpdate`: KubeVirt reports VMs that it has not updated yet"
        " (`outdatedVirtualMachineInstanceWorkloads`)",
        held="KubeVirt is updating VMs, and that has to end first",
        until="KubeVirt has updated all VMs",
        name="an update of KubeVirt",
    ),
    Reason.POLICY: ReasonWords(
        meaning="the VM's entry in `policy.overrides` has `block: true`",
        held="an entry of policy.overrides blocks it",
        until="policy.overrides says otherwise",
        name="block: true",
    ),
    Reason.COOLDOWN: ReasonWords(
        meaning="the last migration ended less than the effective cooldown ago",
        held="it is cooling down after its last migration",
        until="the cooldown ends",
        name="cooling down",
    ),
}


def describe_block(reason: Reason, until: str | None) -> str:
    """Why a VM may not be moved now, and until when, if that is known."""
    return REASONS[reason].held + ("" if until is None else f", until {until}")


def describe_policy(policy: PolicyValues, write: Callable[[Seconds], str]) -> str:
    """The cooldown that a policy sets; `write` writes a duration."""
    parts = []
    for field, words in COOLDOWN_VALUES.items():
        value = getattr(policy, field)
        if field in COOLDOWN_DURATIONS:
            parts.append(f"{words.label} {write(value) if value else 'none'}")
        elif not value:
            parts.append(words.off)
    return ", ".join(parts)


def explain_rule(result: RuleResult, evidence: Evidence, cooldown: Cooldown | None) -> str:
    """Why a rule blocks or does not block a VMI."""
    if not result.enabled:
        return "switched off by policy.guards"
    if result.silenced:
        return "a watch it needs is dead, or an object cannot be read, so this rule cannot block"
    if evidence.vmi.finished:
        return f"the VMI has stopped (phase {evidence.vmi.phase}): nothing is left to move"
    why = EXPLANATIONS[result.rule](evidence, cooldown)
    if result.rule == "running_migration" and evidence.contradicted_at and not result.blocks:
        return f"{why}, but its VMIM ended longer than kube.deadAfter ago"
    return why


def _why_running(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    state = evidence.vmi.migration
    if state is None:
        return "the VMI has no migrationState: it has never migrated"
    if state.ended:
        end = "unreadable" if state.end is None else write_instant(state.end)
        return f"the last migration has ended: endTimestamp is {end}"
    if state.start is None:
        return "migrationState has no startTimestamp"
    return f"startTimestamp is {write_instant(state.start)} and there is no endTimestamp"


def _why_pending(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    if not evidence.trust.sees(Resource.VMIMS):
        return "the exporter cannot watch VMIMs"
    vmim = evidence.unfinished()
    if vmim is None:
        return "no unfinished VMIM belongs to this VMI"
    return f"VMIM {vmim.name} is {vmim.phase or 'new'}"


def _why_requested(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    vmi, launcher = evidence.vmi, evidence.launcher
    if not vmi.evacuation_node:
        return "evacuationNodeName is not set"
    if vmi.evacuation_node != vmi.node:
        return f"evacuationNodeName is {vmi.evacuation_node}, the VMI is on {vmi.node}"
    if launcher is None:
        return "evacuationNodeName is set, but the launcher pod is unknown"
    if launcher.eviction_in_progress:
        return f"pod {launcher.name} has eviction-in-progress: the descheduler knows of this"
    return f"evacuationNodeName is set and pod {launcher.name} lacks eviction-in-progress"


def _why_cooldown(evidence: Evidence, cooldown: Cooldown | None) -> str:
    if cooldown is None:
        migration = evidence.vmi.migration
        if migration is not None and migration.running:
            return "it is not asked while a migration runs"
        return "no migration that counts has ended"
    base, backed, effective = cooldown.base, cooldown.backed, cooldown.effective
    text = f"migrations in the window: {cooldown.migrations_in_window}; base {write_span(base)}"
    if backed > base:
        text += f", backed off to {write_span(backed)}"
    if effective < backed:
        text += f", capped to {write_span(effective)}"
    return f"{text}, from {write_instant(cooldown.end)} on"


EXPLANATIONS: dict[str, Callable[[Evidence, Cooldown | None], str]] = {
    "running_migration": _why_running,
    "pending_migration": _why_pending,
    "requested_evacuation": _why_requested,
    "platform_update": lambda evidence, _: (
        "KubeVirt reports VMs that it still has to update"
        if evidence.platform_updating
        else "KubeVirt reports no VM that it still has to update"
    ),
    "policy": lambda evidence, _: f"policy.overrides has block: true for {evidence.vmi.override}",
    "cooldown": _why_cooldown,
}
"""Why each rule, by its name, blocks or does not block."""
