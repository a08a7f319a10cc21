"""The verdict about one VMI, from the rules alone."""

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Checkpoint, Instant
from exporter.engine.facts.policy import Policy, Verdict
from exporter.engine.verdicts.rules import decide_both


def decide(
    evidence: Evidence,
    policy: Policy,
    now: Instant,
    *,
    checkpoint: Checkpoint | None = None,
) -> Verdict:
    """The verdict at one checkpoint; with None, `filter` if it blocks, else `preEviction`."""
    filtered, pre_eviction, _ = decide_both(evidence, policy, now)
    if checkpoint is None:
        return pre_eviction if filtered.allowed else filtered
    return filtered if checkpoint is Checkpoint.FILTER else pre_eviction
