"""What a caller still knows after a restart, if it keeps its history only in memory.

The reference plugin is such a caller. While it runs, it counts every migration that ends, failed or
not. When it starts, it counts the VMIMs that KubeVirt still has and that succeeded. KubeVirt keeps
the five newest finished VMIMs of a VM. (An attempt that failed before its hand-off takes one of
these places too. That is ignored here, so the caller knows at most this much.)
"""

import math

from msgspec.structs import replace

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import History
from exporter.engine.facts.model import Instant, Outcome, Seconds


KEPT_BY_KUBEVIRT = 5


def find_restart(every: Seconds, now: Instant) -> Instant:
    """The last restart of a caller that restarts at each multiple of `every`; -inf for 0."""
    return now // every * every if every else -math.inf


def forget(evidence: Evidence, every: Seconds, now: Instant) -> Evidence:
    """What a caller that restarts each `every` seconds still has of a VMI; with 0, all of it."""
    restarted_at = find_restart(every, now)
    records = evidence.history.records()
    older = sorted(
        (record.known_end, key)
        for key, record in records.items()
        if record.known_end is not None and record.known_end <= restarted_at
    )
    if not older:
        return evidence
    lost = {key for _, key in older[:-KEPT_BY_KUBEVIRT]}
    lost.update(key for _, key in older if records[key].outcome is not Outcome.SUCCEEDED)
    kept = {key: record for key, record in records.items() if key not in lost}
    return replace(evidence, history=History(kept, evidence.history.revision + len(lost)))
