"""Judges the candidates of `POST /v1/verdicts`, and counts the evictions that a rule blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from exporter.counters import Counters
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.evacuations.outlook import SettledOutcomes, judge
from exporter.engine.facts.model import Instant, Mismatch, Vmi
from exporter.engine.facts.policy import Reason, Verdict
from exporter.engine.verdicts.cooldown import mark_cooldown
from exporter.engine.verdicts.rules import not_ours
from exporter.engine.verdicts.view import Entry, VerdictView
from exporter.health import Health
from exporter.logs import Throttle
from exporter.server.api.answers import write_verdict
from exporter.server.api.requests import Candidate, VerdictRequest, decode_verdicts
from exporter.server.api.schemas import VerdictAnswer, VerdictsAnswer
from exporter.server.http.problems import Refusal
from exporter.settings import Limits
from exporter.text import to_datetime, to_optional_datetime, write_optional_release


BLOCKS_REMEMBERED = 20_000

log = structlog.stdlib.get_logger()


@dataclass
class Judge:
    """Judges candidates. `record_blocked`, if set, is called for each blocked eviction."""

    view: VerdictView
    health: Health
    counters: Counters
    limits: Limits
    clock: Callable[[], Instant]
    read_conditions: Callable[[Instant], Conditions]
    record_blocked: Callable[[Vmi, Verdict, Instant], None] | None
    _logged: Throttle = field(default_factory=lambda: Throttle(BLOCKS_REMEMBERED))

    def answer(self, body: bytes) -> bytes:
        """The answer to a verdict request with this body. Raises `Refusal`."""
        asked = decode_verdicts(body)
        candidates = asked.candidates or []
        if len(candidates) > self.limits.candidates:
            raise Refusal(
                422,
                "Too many candidates",
                f"candidates: got {len(candidates)}, at most {self.limits.candidates} are allowed"
                " (limits.candidates)",
            )
        now = self.clock()
        return msgspec.json.encode(
            VerdictsAnswer(
                as_of=to_datetime(now),
                observed_at=to_optional_datetime(self.health.observed_at),
                stale=self.health.is_stale(now, (candidate.namespace for candidate in candidates)),
                verdicts=self._judge(asked, candidates, now),
            )
        )

    def _judge(
        self, asked: VerdictRequest, candidates: list[Candidate], now: Instant
    ) -> list[VerdictAnswer]:
        """Judge all candidates in one loop: 1,000 more function calls would take too long."""
        checkpoint, is_counted = asked.checkpoint, not asked.dry_run
        conditions = self.read_conditions(now)
        settled = SettledOutcomes(conditions)
        find = self.view.read(now, conditions.trust).find
        answers, allowed = [], 0
        for candidate in candidates:
            namespace, name, uid = candidate.namespace, candidate.name, candidate.vmi_uid
            entry = find(namespace, name)
            diagnosis: Diagnosis | Move | None = None
            drain: DrainOutcome | None = None
            if entry is None:
                verdict = not_ours(Mismatch.UNKNOWN)
            elif uid and uid != entry.evidence.vmi.uid:
                verdict = not_ours(Mismatch.UID)
            else:
                verdict, evidence = entry.verdict(checkpoint), entry.evidence
                if entry.settled is not None:
                    drain = settled.judge(evidence, entry.settled)
                else:
                    evacuation = conditions.diagnose(evidence)
                    diagnosis = evacuation or conditions.diagnose_move(evidence)
                    if not evidence.vmi.finished:
                        drain = judge(evidence, conditions, evacuation).outcome
            if verdict.reason is None:
                allowed += 1
            if is_counted and (verdict.reason is not None or not verdict.known):
                self._count(candidate, entry, verdict, now)
            answers.append(
                write_verdict(namespace, name, verdict, now, diagnosis=diagnosis, drain=drain)
            )
        if is_counted:
            self.counters.verdicts[checkpoint, True] += allowed
            self.counters.verdicts[checkpoint, False] += len(candidates) - allowed
        return answers

    def count_blocked(
        self,
        vmi: Vmi,
        verdict: Verdict,
        reason: Reason,
        now: Instant,
        *,
        entry: Entry | None = None,
    ) -> None:
        """Count an eviction that a verdict has blocked, the webhook denied or the responder held.

        `entry` is the VMI's, if the caller has it.
        """
        self.counters.count_block(
            reason, vmi.node, vmi.namespace, verdict.effective_cooldown, now=now
        )
        if entry is None and reason is Reason.COOLDOWN:
            verdicts = self.view.read(now, self.health.read_trust(now))
            entry = verdicts.find(vmi.namespace, vmi.name)
        if reason is Reason.COOLDOWN and entry is not None and entry.cooldown is not None:
            mark = mark_cooldown(entry.evidence, entry.cooldown)
            self.counters.prevented.count(vmi, entry.cooldown, mark)
        if self.record_blocked is not None:
            self.record_blocked(vmi, verdict, now)

    def _count(
        self, candidate: Candidate, entry: Entry | None, verdict: Verdict, now: Instant
    ) -> None:
        if verdict.mismatch is not None:
            self.counters.unknown_candidates[verdict.mismatch] += 1
        if verdict.reason is None or entry is None:
            return
        vmi = entry.evidence.vmi
        self.count_blocked(vmi, verdict, verdict.reason, now, entry=entry)
        if self._logged.lets_through((vmi.namespace, vmi.name, verdict.reason), now):
            log_blocked("eviction_blocked", vmi, verdict, pod=candidate.pod)


def log_blocked(event: str, vmi: Vmi, verdict: Verdict, **request: str | None) -> None:
    """Log an eviction that a rule blocks, or would block."""
    log.info(
        event,
        **request,
        namespace=vmi.namespace,
        name=vmi.name,
        node=vmi.node,
        reason=str(verdict.reason),
        not_before=write_optional_release(verdict.not_before),
    )
