"""Admission reviews of evictions: parse, judge by the rules, answer. Pure.

Only an eviction that a rule blocks is denied. An eviction that cannot be parsed or judged is
allowed. A denial has no `retryAfterSeconds`, because client-go would wait that long inside the
caller. A denial never has KubeVirt's text about a running evacuation, because a descheduler would
then count the pod as being evicted.
"""

import math
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from exporter.counters import ReviewOutcome
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.facts.policy import Policy, Reason, Verdict
from exporter.engine.store.store import Store
from exporter.engine.verdicts.view import VerdictView
from exporter.errors import MALFORMED, ExporterError
from exporter.health import Health
from exporter.kube.objects.facts import text_of
from exporter.settings import KUBERNETES_EVICTOR, AdmissionMode, AdmissionSettings
from exporter.text import (
    format_duration,
    write_instant,
    write_span,
)
from exporter.words.verdicts import REASONS


NAME = "kubevirt-eviction-exporter"
API_VERSION = "admission.k8s.io/v1"
OLD_API_VERSION = "admission.k8s.io/v1beta1"
AUDIT_ANNOTATION, HELD_ANNOTATION = "would-deny", "held-too-long"
LONGEST_USER = 256
"""Longer user names are cut."""
_DAY: Seconds = 86_400.0


class NotAReview(ExporterError):
    """The body has no request UID, so it cannot be answered; the text says what is wrong."""


class Review(Struct, frozen=True, kw_only=True):
    """The fields of an AdmissionReview's request that are used.

    `is_eviction`: this is a v1 review of a request to create the eviction of a pod.
    """

    uid: str
    version: str = API_VERSION
    is_eviction: bool = False
    user: str = ""
    groups: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    dry_run: bool = False


class Judgement(Struct, frozen=True, kw_only=True):
    """The outcome of a review. If a rule blocks, it has the evidence and the verdict too."""

    outcome: ReviewOutcome
    evidence: Evidence | None = None
    verdict: Verdict | None = None

    @property
    def allowed(self) -> bool:
        """Whether the eviction is allowed."""
        return self.outcome is not ReviewOutcome.DENIED


class _Status(Struct):
    code: int
    reason: str
    message: str


class _Response(Struct, rename="camel"):
    uid: str
    allowed: bool
    status: _Status | UnsetType = UNSET
    audit_annotations: dict[str, str] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class _Answer(Struct, rename="camel"):
    api_version: str
    response: _Response
    kind: str = "AdmissionReview"


def read_review(body: bytes) -> Review:
    """Parse the request of an AdmissionReview. Raises `NotAReview` if it has no UID.

    Other invalid fields count as absent, so that the eviction is allowed.
    """
    try:
        document = msgspec.json.decode(body)
    except MALFORMED as error:
        raise NotAReview(f"the body is not JSON: {error}") from None
    request = _mapping(_mapping(document).get("request"))
    uid = text_of(request.get("uid"))
    if not uid:
        raise NotAReview("expected an AdmissionReview with a request.uid")
    version = text_of(_mapping(document).get("apiVersion"))
    user, resource = _mapping(request.get("userInfo")), _mapping(request.get("resource"))
    groups = user.get("groups")
    # `dryRun` is in the request's create options or in the Eviction itself.
    dry_run = _mapping(_mapping(request.get("object")).get("deleteOptions")).get("dryRun")
    return Review(
        uid=uid,
        version=OLD_API_VERSION if version == OLD_API_VERSION else API_VERSION,
        is_eviction=version == API_VERSION
        and request.get("operation") == "CREATE"
        and request.get("subResource") == "eviction"
        and resource.get("resource") == "pods"
        and resource.get("group") == "",
        user=text_of(user.get("username")),
        groups=tuple(g for g in groups if isinstance(g, str)) if isinstance(groups, list) else (),
        namespace=text_of(request.get("namespace")),
        pod=text_of(request.get("name")),
        dry_run=request.get("dryRun") is True or (isinstance(dry_run, list) and "All" in dry_run),
    )


def judge(
    review: Review,
    admission: AdmissionSettings,
    *,
    store: Store,
    view: VerdictView,
    health: Health,
    now: Instant,
    responder: str = "",
) -> Judgement:
    """Judge a review at `now`, without regard to `admission.maxHold`.

    `responder` is the name under which the exporter answers EvictionRequests; "": it does not.
    """
    if review.user not in admission.users and not set(admission.groups) & set(review.groups):
        return Judgement(outcome=ReviewOutcome.UNLISTED_USER)
    trust = health.read_trust(now)
    here = trust.of(review.namespace)
    available = health.ready and here.believes(Resource.VMIS)
    pair = store.find_pod(review.namespace, review.pod) if review.is_eviction else None
    if pair is None and (not review.is_eviction or (available and here.sees(Resource.PODS))):
        return Judgement(outcome=ReviewOutcome.UNKNOWN_POD)
    verdicts = view.read(now, trust)
    entry = None if pair is None else verdicts.find(pair[1].namespace, pair[1].name)
    if pair is None or entry is None or not available:
        return Judgement(outcome=ReviewOutcome.UNAVAILABLE)
    pod, _ = pair
    evidence, verdict = entry.evidence, entry.verdict(None)
    if evidence.believed_at(now).is_target(pod):
        verdict = replace(verdict, reason=Reason.MIGRATION_IN_PROGRESS, not_before=None)
    elif evidence.vmi.evacuation_node or evidence.marker is not None:
        return Judgement(outcome=ReviewOutcome.EVACUATING, evidence=evidence)
    # An EvictionRequest that the responder has held is not held again. A finished pod, such as the
    # source of an ended migration, runs no VM that could be moved.
    eviction = store.evictions.find((pod,)) if review.user == KUBERNETES_EVICTOR else None
    was_held = eviction is not None and responder in eviction.responders
    if verdict.allowed or was_held or pod.finished:
        return Judgement(outcome=ReviewOutcome.ALLOWED)
    enforced = admission.mode is AdmissionMode.ENFORCE
    return Judgement(
        outcome=ReviewOutcome.DENIED if enforced else ReviewOutcome.WARNED,
        evidence=evidence,
        verdict=verdict,
    )


def write_answer(
    review: Review, judgement: Judgement | None, policy: Policy, now: Instant
) -> bytes:
    """Encode the answer to a review; without a judgement the eviction is allowed."""
    response = _Response(uid=review.uid, allowed=True)
    if judgement is not None and judgement.evidence is not None and judgement.verdict is not None:
        message = write_message(judgement.evidence, judgement.verdict, policy, now)
        if judgement.allowed:
            held = judgement.outcome is ReviewOutcome.HELD_TOO_LONG
            why = (
                "allows this eviction after admission.maxHold"
                if held
                else "would deny this eviction"
            )
            response.warnings = [f"{NAME} {why}: {message}"]
            response.audit_annotations = {HELD_ANNOTATION if held else AUDIT_ANNOTATION: message}
        else:
            response.allowed = False
            response.status = _Status(429, "TooManyRequests", f"{NAME}: {message}")
    return msgspec.json.encode(_Answer(api_version=review.version, response=response))


def write_message(evidence: Evidence, verdict: Verdict, policy: Policy, now: Instant) -> str:
    """Which VMI is blocked, why and until when."""
    vmi = evidence.vmi
    text = f"VMI {vmi.namespace}/{vmi.name}: {verdict.reason}"
    reason = verdict.reason
    if reason is None or reason in (Reason.MIGRATION_IN_PROGRESS, Reason.EVACUATION_IN_PROGRESS):
        vmim, state = evidence.unfinished(), vmi.migration
        if vmim is not None:
            return f"{text}: VMIM {vmim.name} is {vmim.phase or 'new'}"
        start = None if state is None else state.start
        return text if start is None else f"{text} since {write_instant(start)}"
    if verdict.not_before is None:
        return f"{text} until {REASONS[reason].until}"
    left = math.ceil(verdict.not_before) - now
    until = write_instant(math.ceil(verdict.not_before))
    if left < _DAY:
        until = until.partition("T")[2]
    text += f" until {until} (in {write_span(max(1, math.ceil(left)))})"
    count = verdict.migrations_in_window
    if count:
        window = format_duration(policy.of(vmi).migration_history_window)
        text += f", after {count} migration{'' if count == 1 else 's'} in {window}"
    return text


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
