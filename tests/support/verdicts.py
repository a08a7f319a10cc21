"""The verdict about one VMI, without a view."""

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Checkpoint, Instant
from exporter.engine.facts.policy import Policy, Verdict
from exporter.engine.verdicts.view import evaluate


def decide(
    evidence: Evidence,
    policy: Policy,
    now: Instant,
    *,
    checkpoint: Checkpoint | None = None,
) -> Verdict:
    """The verdict at one checkpoint; with None, `filter` if it blocks, else `preEviction`."""
    return evaluate(evidence, policy, now).verdict(checkpoint)
