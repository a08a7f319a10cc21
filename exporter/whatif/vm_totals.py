"""Per VM under one policy: its migrations, and how long it was under cooldown.

A VM's totals go into the account when the VM is deleted. So only VMs that exist at the same time
need memory.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, MigrationState, Outcome, Vmi
from exporter.engine.facts.policy import Policy
from exporter.engine.verdicts.cooldown import measure_cooldown
from exporter.whatif.account import Account


class _Totals(Struct):
    """One VM. `seen` is its migration at the last count; its cooldown is from `since` to `until`.

    The cooldown was computed from `measured`: the migration, the history's revision and the VM's
    entry of `policy.overrides`.
    """

    seen: MigrationState | None
    migrations: int = 0
    failed: int = 0
    measured: tuple[MigrationState | None, int, str] = (None, 0, "")
    since: Instant = 0.0
    until: Instant = 0.0
    at_cap: bool = False


@dataclass
class VmTotals:
    """Counts in `account` the migrations and the cooldown time of all VMs."""

    policy: Policy
    account: Account
    _totals: dict[str, _Totals] = field(default_factory=dict)

    def count_migration(self, vmi: Vmi) -> None:
        """Count a migration that has ended since the last call for this VM."""
        totals = self._totals.setdefault(vmi.uid, _Totals(vmi.migration))
        seen, state = totals.seen, vmi.migration
        totals.seen = state
        if state is None or not state.ended or seen is state:
            return
        if seen and seen.ended and (seen.uid, seen.start) == (state.uid, state.start):
            return
        has_failed = state.outcome is Outcome.FAILED
        totals.migrations += 1
        totals.failed += has_failed
        self.account.migrations.ended += 1
        self.account.migrations.failed += has_failed

    def measure_cooldown(self, evidence: Evidence, now: Instant) -> None:
        """Compute the VM's cooldown again if it may have changed.

        Most events do not change it, and to compute it takes most of a replay's time.
        """
        totals = self._totals[evidence.vmi.uid]
        state = evidence.vmi.migration
        measured = (state, evidence.history.revision, evidence.vmi.override)
        was_handed_off = state is not None and state.start is None and not state.ended
        if measured == totals.measured and not was_handed_off:
            return
        self._add_cooldown(totals, now)
        totals.since = totals.until = now
        totals.measured = measured
        if state is None or state.running:
            return
        policy = self.policy.of(evidence.vmi)
        cooldown = measure_cooldown(evidence, policy, now)
        if cooldown is None or not cooldown.blocks:
            return
        totals.until = max(cooldown.released_at, now)
        cap = policy.max_migration_cooldown
        totals.at_cap = totals.at_cap or (cap > 0 and cooldown.effective >= cap)

    def complete(self, uid: str, now: Instant) -> None:
        """Add the totals of a VM when it is deleted, or when the recording ends."""
        totals = self._totals.pop(uid, None)
        if totals is None:
            return
        self._add_cooldown(totals, now)
        self.account.vms_at_cap += totals.at_cap
        if totals.migrations:
            counts = self.account.migrations
            never_moved = totals.failed == totals.migrations
            (counts.per_failing_vm if never_moved else counts.per_vm)[totals.migrations] += 1

    def close(self, now: Instant) -> None:
        """Add the totals of all VMs at the end of the recording."""
        for uid in list(self._totals):
            self.complete(uid, now)

    def _add_cooldown(self, totals: _Totals, now: Instant) -> None:
        until = min(totals.until, now)
        if until > totals.since:
            self.account.cooldown_seconds += until - totals.since
            self.account.cooling_over_time.spread(totals.since, until)
