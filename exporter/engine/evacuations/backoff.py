"""KubeVirt's pause before it tries a failed evacuation again.

`migration.go: handleMigrationBackoff`: the newest evacuation or workload-update VMIM of a VMI stays
Pending for 20 s * 2^(n-1) after the last failure, with n failures since the last success.
"""

from msgspec import Struct

from exporter.engine.facts.model import Instant, Seconds, Vmim


class Backoff(Struct, frozen=True):
    """KubeVirt's current pause before the next attempt."""

    seconds: Seconds
    next_try: Instant


def compute_backoff(vmims: tuple[Vmim, ...], first: Seconds) -> Backoff | None:
    """The backoff of a Pending attempt, even if it has passed already.

    `first` is KubeVirt's first pause (20 s). None if the newest attempt is not Pending, if no
    attempt failed before it, or if the time of that failure is unknown.
    """
    eligible = sorted(
        (vmim for vmim in vmims if vmim.retried),
        key=lambda vmim: (vmim.created or 0.0, vmim.name),
        reverse=True,
    )
    if len(eligible) < 2 or eligible[0].phase != "Pending":
        return None
    failures = 0
    for vmim in eligible[1:]:
        if vmim.phase == "Succeeded":
            break
        if vmim.phase == "Failed" and not vmim.deleting:
            failures += 1
    last = eligible[1]
    if not failures or last.phase != "Failed" or last.finished_at is None:
        return None
    seconds = first * 2.0 ** min(failures - 1, 32)
    return Backoff(seconds=seconds, next_try=last.finished_at + seconds)
