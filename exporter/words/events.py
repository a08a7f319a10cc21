"""The texts of Kubernetes Events about a VMI."""

import math

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Vmi, Why
from exporter.engine.facts.policy import Reason, Verdict
from exporter.text import write_instant, write_span
from exporter.words.advice import choose_advice
from exporter.words.verdicts import REASONS


def write_blocked(verdict: Verdict) -> str:
    """Why evictions are blocked, and until when."""
    if verdict.reason is Reason.COOLDOWN and verdict.not_before is not None:
        until = write_instant(math.ceil(verdict.not_before))
        count = verdict.migrations_in_window
        return (
            f"Eviction blocked: {verdict.reason} until {until}, migrations in the window: {count}"
        )
    until = REASONS[verdict.reason or Reason.MIGRATION_IN_PROGRESS].until
    return f"Eviction blocked: {verdict.reason}, until {until}"


def write_stuck(
    evidence: Evidence,
    diagnosis: Diagnosis,
    reasons: tuple[Why, ...],
    conditions: Conditions,
) -> str:
    """A stuck evacuation: its requester, its state, what to do, the cause, and other reasons."""
    age = write_span(conditions.now - diagnosis.requested_at, units=2)
    advice = choose_advice(evidence, diagnosis, reasons, conditions)
    cause, requester = advice.cause, evidence.requested_by
    by = "" if requester is None else f", requested by {requester.user},"
    whys = [] if cause is None else [cause]
    whys += [why for why in reasons if why != cause]
    return (
        f"Evacuation from {diagnosis.node}{by} is stuck after {age}: {diagnosis.state}, failed"
        f" attempts: {diagnosis.failed_attempts}. {advice.sentence} Begin with: {advice.command}"
        f" (runbook {advice.runbook})"
        + "".join(f" {why.source}: {why.reason}: {why.message}" for why in whys)
    )


def write_ended(vmi: Vmi, diagnosis: Diagnosis, *, ended_at: Instant) -> str:
    """How an evacuation that was reported as stuck has ended."""
    age = write_span(ended_at - diagnosis.requested_at, units=2)
    outcome = f"the VM is {'still' if vmi.node == diagnosis.node else 'now'} on {vmi.node}"
    return (
        f"Evacuation from {diagnosis.node} ended after {age} (failed attempts:"
        f" {diagnosis.failed_attempts}): {'the VM has stopped' if vmi.finished else outcome}"
    )
