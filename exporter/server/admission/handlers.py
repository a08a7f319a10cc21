"""The HTTP side of the admission webhook: `POST /v1/evictions` on its own listener.

This listener has no authentication, because by default the API server sends no credentials to
webhooks. So it serves only this path and limits the size of the body. It changes only counters and,
with `admission.observe`, the record of who requested an eviction.
"""

from collections import Counter
from dataclasses import replace

import structlog
from aiohttp import hdrs, web
from msgspec import structs

from exporter.counters import BlockedEviction, ReviewOutcome
from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.model import Instant
from exporter.logs import Throttle
from exporter.server.admission.reviews import (
    LONGEST_USER,
    Judgement,
    NotAReview,
    Review,
    judge,
    read_review,
    write_answer,
)
from exporter.server.api.handlers import Service
from exporter.server.api.judge import log_blocked
from exporter.server.api.requests import read_body
from exporter.server.apps import answering_problems, timed_handler
from exporter.server.http.problems import Refusal
from exporter.settings import AdmissionSettings
from exporter.text import escape


PATH = "/v1/evictions"
REVIEW_BYTES = 2**18
"""The most bytes of an accepted review; the review of an Eviction has 1 or 2 kB."""
REMEMBERED = 1_000

EVENTS = {
    ReviewOutcome.DENIED: "eviction_denied",
    ReviewOutcome.WARNED: "eviction_would_be_denied",
    ReviewOutcome.HELD_TOO_LONG: "eviction_allowed_after_max_hold",
}

log = structlog.stdlib.get_logger()


class Admission:
    """Answers admission reviews from the same store and rules as the query API."""

    def __init__(
        self, service: Service, settings: AdmissionSettings, *, responder: str = ""
    ) -> None:
        self._service = service
        self._responder = responder
        self._settings = settings
        self._limits = replace(
            service.limits, body_bytes=min(service.limits.body_bytes, REVIEW_BYTES)
        )
        self._logged = Throttle(REMEMBERED)
        # Without users and groups, `UNLISTED_USER` is the only outcome. If the others were exposed
        # as zeros, the alert KubeVirtEvictionWebhookFailing would fire.
        is_judging = bool(settings.users or settings.groups)
        outcomes = ReviewOutcome if is_judging else (ReviewOutcome.UNLISTED_USER,)
        self._reviews = service.counters.reviews = Counter(dict.fromkeys(outcomes, 0))

    def make_app(self) -> web.Application:
        """The application of the admission listener."""
        counters = self._service.counters
        app = web.Application(
            middlewares=[answering_problems(counters)], client_max_size=self._limits.body_bytes
        )
        app.router.add_post(PATH, timed_handler("evictions", self.answer, counters))
        return app

    async def answer(self, request: web.Request) -> web.Response:
        """POST /v1/evictions."""
        body = await read_body(request, self._limits)
        try:
            review = read_review(body)
        except NotAReview as error:
            raise Refusal(422, "Not an admission review", str(error)) from None
        response = web.Response(body=self._review(review), content_type="application/json")
        if self._service.closing:
            # The API server then connects again, to a replica that is not shutting down.
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()
        return response

    def _review(self, review: Review) -> bytes:
        """Judge, count and answer a review. After an internal error, the eviction is allowed."""
        service = self._service
        now = service.clock()
        try:
            judgement = judge(
                review,
                self._settings,
                store=service.store,
                view=service.view,
                health=service.health,
                now=now,
                responder=self._responder,
            )
            evidence, longest = judgement.evidence, self._settings.max_hold
            if judgement.outcome is ReviewOutcome.DENIED and evidence is not None and longest > 0:
                period = service.counters.denial_periods.find(evidence.vmi, now)
                if period is not None and now - period.since >= longest:
                    judgement = structs.replace(judgement, outcome=ReviewOutcome.HELD_TOO_LONG)
            answer = write_answer(review, judgement, service.policy, now)
            # The API server sends only evictions; other reviews come from somebody else.
            if review.is_eviction and not review.dry_run:
                self._count(review, judgement, now)
                if self._settings.observe and judgement.allowed:
                    user = escape(review.user[:LONGEST_USER])
                    change = EvictionAdmitted(review.namespace, review.pod, user)
                    service.store.apply(change, now)
        except Exception:
            log.exception("review_failed")
            return write_answer(review, None, service.policy, now)
        return answer

    def _count(self, review: Review, judgement: Judgement, now: Instant) -> None:
        counters, outcome = self._service.counters, judgement.outcome
        self._reviews[outcome] += 1
        if outcome is ReviewOutcome.ALLOWED or outcome in EVENTS:
            counters.verdicts[None, outcome is ReviewOutcome.ALLOWED] += 1
        evidence, verdict = judgement.evidence, judgement.verdict
        if outcome is ReviewOutcome.EVACUATING and evidence is not None:
            counters.denial_periods.end(evidence.vmi)
        if evidence is None or verdict is None or verdict.reason is None:
            return
        denied, vmi = outcome is ReviewOutcome.DENIED, evidence.vmi
        if denied:
            self._service.judge.count_blocked(vmi, verdict, verdict.reason, now)
        if denied or outcome is ReviewOutcome.HELD_TOO_LONG:
            cooldown = verdict.effective_cooldown or self._service.policy.migration_cooldown
            counters.denial_periods.extend(vmi, verdict.reason, cooldown, now)
        user = escape(review.user[:LONGEST_USER])
        counters.blocked_evictions.record(
            vmi.uid, BlockedEviction(user=user, at=now, reason=verdict.reason, denied=denied)
        )
        if self._logged.lets_through((vmi.uid, user, verdict.reason), now):
            log_blocked(EVENTS[outcome], vmi, verdict, user=user, pod=review.pod)
