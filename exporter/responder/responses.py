"""What to answer to the EvictionRequests for one launcher pod at one instant. Pure.

While a rule blocks the VM, the eviction is held. As soon as none does, the exporter evicts the pod
itself, so that it may go on saying what happens, or it hands over to the next responder, which is
Kubernetes' own. A VM that KubeVirt would stop is never evicted here.
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.drain_outcomes import DrainOutcome, Ground
from exporter.engine.evacuations.outlook import Outlook, judge
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Eviction, Instant, Pod, Resource, Seconds, Why
from exporter.engine.facts.policy import Policy, Reason, Verdict
from exporter.engine.verdicts.rules import decide_both
from exporter.text import write_optional_release
from exporter.words.advice import Advice, choose_advice, choose_outlook_advice
from exporter.words.evacuations import GROUNDS
from exporter.words.verdicts import describe_block


class Step(StrEnum):
    """What to do about an Eviction."""

    HOLD = "hold"
    EVICT = "evict"
    """Ask KubeVirt to move the VM."""
    FOLLOW = "follow"
    """The VM is leaving: say how far it is."""
    COMPLETE = "complete"
    """Leave it to the next responder."""


class Response(Struct, frozen=True, kw_only=True):
    """The step, and what to write: the message, and when the responder should be done, if known.

    `verdict` is the one that holds the eviction.
    """

    step: Step
    message: str
    expected_at: Instant | None = None
    verdict: Verdict | None = None


def respond(
    eviction: Eviction,
    pod: Pod,
    evidence: Evidence,
    conditions: Conditions,
    policy: Policy,
    *,
    why: tuple[Why, ...],
    longest_hold: Seconds,
    evicts: bool,
) -> Response:
    """The response to the Eviction of a launcher pod, which belongs to the VMI of `evidence`.

    `why` are the VMI's reasons, `longest_hold` is how long to hold (0: without a limit).
    """
    vmi = evidence.vmi
    place = f"{vmi.namespace}/{vmi.name}"
    if pod.finished:
        done = "stopped on" if vmi.node == pod.node else "left"
        return Response(step=Step.COMPLETE, message=f"{place} has {done} {pod.node}.")
    believed = evidence.believed_at(conditions.now)
    is_target, diagnosis = believed.is_target(pod), conditions.diagnose(evidence)
    if not is_target and (pod.node != vmi.node or diagnosis is not None):
        message = f"{place} is on {vmi.node}, and its pod on {pod.node} has not ended yet."
        if pod.node == vmi.node and diagnosis is not None:
            advice = choose_advice(evidence, diagnosis, why, conditions)
            message = (
                f"{place} leaves {diagnosis.node}: {diagnosis.state}, failed attempts:"
                f" {diagnosis.failed_attempts}. {_write_advice(advice)}"
            )
        end = _expect_end(evidence, conditions.now)
        return Response(
            step=Step.FOLLOW if evicts else Step.COMPLETE, message=message, expected_at=end
        )
    verdict = _decide(evidence, policy, conditions.now, is_target=is_target)
    began = eviction.started_at or eviction.created or conditions.now
    is_held = not longest_hold or conditions.now - began < longest_hold
    if verdict.reason is not None and is_held and evidence.trust.believes(Resource.VMIS):
        until = write_optional_release(verdict.not_before)
        return Response(
            step=Step.HOLD,
            message=f"{place} may not be moved now: {describe_block(verdict.reason, until)}.",
            expected_at=verdict.not_before,
            verdict=verdict,
        )
    outlook = judge(evidence, conditions, diagnosis)
    step = Step.EVICT
    if outlook.ground is Ground.NO_CONDITION and is_held:
        step = Step.HOLD
    elif (
        not evicts
        or outlook.outcome is DrainOutcome.RESTARTS
        or outlook.ground in (Ground.BUDGET, Ground.NO_CONDITION)
    ):
        step = Step.COMPLETE
    return Response(step=step, message=_describe_outlook(evidence, outlook, why, conditions))


def _decide(evidence: Evidence, policy: Policy, now: Instant, *, is_target: bool) -> Verdict:
    """The verdict by all rules but the one about requested evacuations."""
    values = replace(policy.of(evidence.vmi), guard_evacuations=False)
    filtered, pre_eviction, _ = decide_both(evidence, values, now)
    verdict = pre_eviction if filtered.reason is None else filtered
    if is_target:
        return replace(verdict, reason=Reason.MIGRATION_IN_PROGRESS, not_before=None)
    return verdict


def _describe_outlook(
    evidence: Evidence, outlook: Outlook, why: tuple[Why, ...], conditions: Conditions
) -> str:
    vmi = evidence.vmi
    message = f"If {vmi.namespace}/{vmi.name} is evicted, it {GROUNDS[outlook.ground]}."
    advice = choose_outlook_advice(evidence, outlook, why, conditions)
    return message if advice is None else f"{message} {_write_advice(advice)}"


def _write_advice(advice: Advice) -> str:
    cause = advice.cause
    cause_text = "" if cause is None else f"{cause.reason}: {cause.message} ".removeprefix(": ")
    return f"{cause_text}{advice.sentence} Begin with: {advice.command}"


def _expect_end(evidence: Evidence, now: Instant) -> Instant | None:
    """When a running migration should end, if it takes as long as the VM's last one."""
    start, duration = evidence.migration_start, evidence.history.last_duration()
    migration = evidence.vmi.migration
    if migration is None or not migration.running or start is None or duration is None:
        return None
    return start + duration if start + duration > now else None
